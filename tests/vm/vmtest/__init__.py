"""Runs the project's tests on stock kernels under QEMU; `scripts/vm` is the command.

settings   what the environment says, and the two exceptions
kernels    the lists of kernels and modules; fetching a kernel, or building one
debian     packages from Debian's archive, without installing them
initramfs  the guest's file system
qemu       the command lines of the guests, and running one
profiles   the counts of instrumented programs in the guest
report     what the guest said, as `cargo test` would print it
suites     which tests run in which guest
served     the served card in a guest
tables     the tables of the benchmark pages
cli        the commands
"""
