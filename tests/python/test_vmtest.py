"""The package behind scripts/vm: its lists, its archives, its command lines, what it makes of what a guest says.

The last tests run the script itself with a cargo and a QEMU that are a few lines of Python.
"""

import base64
import io
import json
import lzma
import os
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from conftest import ROOT
from vmtest import (
    binaries,
    cli,
    debian,
    initramfs,
    kernels,
    mesa,
    newer_qemu,
    profiles,
    qemu,
    report,
    served,
    suites,
    tables,
)
from vmtest.settings import Failed, Settings, Skip

KERNELS = """
# name command suite packages
6.12   run     bookworm-backports linux-image-6\\.12\\.[0-9]+
arm    arm64   sid                image modules  # two packages
new    iommufd sid                linux-source
"""


def settings(folder, **env):
    return Settings.from_environment({"CARGO_TARGET_DIR": str(folder)} | env)


# ---- lists and settings ----


def test_a_list_of_kernels_is_read():
    stock, arm, new = kernels.parse_kernels(KERNELS)
    assert stock == kernels.Kernel("6.12", "run", "bookworm-backports", (r"linux-image-6\.12\.[0-9]+",))
    assert (stock.arch, stock.is_built) == (None, False)
    assert (arm.arch, arm.packages) == ("arm64", ("image", "modules"))
    assert new.is_built
    with pytest.raises(ValueError, match="kernel x has no package"):
        kernels.parse_kernels("x run sid")


def test_the_lists_of_the_project_fit_the_commands():
    listed = kernels.all_kernels()
    assert len({kernel.name for kernel in listed}) == len(listed)
    assert {kernel.command for kernel in listed} <= set(cli.COMMANDS)
    for command in set(cli.COMMANDS) - {"list"}:
        assert cli.chosen(command, [], listed), f"{command} has no kernel"
    # tests/vm/init runs the suites of stage "untyped" before this one.
    assert kernels.all_modules()[-1] == "vfio_iommu_type1"
    assert cli.COMMANDS.keys() >= cli.DEFAULT_KERNELS.keys()
    assert tables.TABLES.keys() <= cli.COMMANDS.keys()


def test_kernels_are_chosen_by_name_and_architecture():
    listed = kernels.parse_kernels(KERNELS)

    def names(command, *names):
        return [kernel.name for kernel in cli.chosen(command, names, listed)]

    assert names("run") == names("bar-map") == names("fetch") == names("vfio-user") == ["6.12"]
    assert names("dma-map") == names("iommufd") == ["new"]
    assert names("arm64") == ["arm"]
    assert names("bar-map", "new", "6.12") == ["new", "6.12"]
    assert names("fetch", "arm") == ["arm"]
    for command, name, why in [("run", "6.1", "has no 6.1"), ("run", "arm", "not for"), ("arm64", "6.12", "not for")]:
        with pytest.raises(ValueError, match=why):
            names(command, name)


def test_the_environment_sets_what_the_help_lists(tmp_path):
    plain = settings(tmp_path)
    assert (plain.cache, plain.seconds, plain.filter, plain.jobs) == (tmp_path / "vm", None, "", 1)
    env = {
        "DMALANE_VM_CACHE": "/cache", "DMALANE_VM_SECONDS": "9", "DMALANE_VM_FILTER": "heap",
        "DMALANE_VM_GIB": "1 32", "DMALANE_VM_ALIGN": "2M none", "DMALANE_VM_ROUNDS": "3", "DMALANE_VM_JOBS": "2",
        "DMALANE_VM_SIZES": "4096",
        "DMALANE_VM_MIRROR": "http://x", "DMALANE_VM_PROFILES": "/counts",
    }  # fmt: skip
    found = settings(tmp_path, **env)
    assert found == Settings(
        tmp_path, Path("/cache"), False, 9, "heap", (1, 32), ("2M", "none"), 3, (4096,), 2, "http://x",
        Path("/counts"),
    )  # fmt: skip
    for name in env:
        assert name in cli.EPILOG
    with pytest.raises(SystemExit, match="DMALANE_VM_GIB=1G: not a number"):
        settings(tmp_path, DMALANE_VM_GIB="1G")


# ---- Debian's archive ----


def test_the_newest_package_is_taken_by_number():
    names = ["linux-6.12.9", "linux-6.12.10", "linux-6.12.10-dbg", "linux-6.2.30"]
    assert debian.newest(names, r"linux-6\.12\.[0-9]+") == "linux-6.12.10"
    assert debian.newest(names, "linux") is None


def test_the_mirror_is_debians_own():
    targets = "Debian http://security.example/debian-security\nOther http://o/\nDebian http://deb.example/debian\n"
    assert debian.mirror_of(targets) == "http://deb.example/debian"
    assert debian.mirror_of("Other http://o/\n") is None


def fake_program(folder, name, lines):
    """A program in `folder`, which the tests put in front of PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text("\n".join([f"#!{sys.executable}", "import json, os, sys, time", *lines]) + "\n")
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_apt_is_asked_once_and_its_failure_is_a_reason(tmp_path, programs, monkeypatch):
    monkeypatch.setattr(debian, "KEYRING", Path(__file__))
    log = tmp_path / "log"
    fake_program(programs, "dpkg", [])
    fake_program(
        programs,
        "apt-get",
        [
            f"open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')",
            "print('E: no such host', file=sys.stderr)",
            "sys.exit('download' in sys.argv)",
        ],
    )
    fake_program(programs, "apt-cache", ["print('linux-1', 'linux-2', sep='\\n')"])
    archive = debian.Archive(settings(tmp_path, DMALANE_VM_MIRROR="http://deb.example"), ["sid"], "arm64")
    archive.update()
    archive.update()
    assert log.read_text().count("update") == 1
    assert "APT::Architecture=arm64" in log.read_text()
    assert (archive.folder / "sources.list").read_text().endswith(" http://deb.example sid main\n")
    with pytest.raises(Skip, match="cannot download linux-2: E: no such host"):
        archive.fetch(tmp_path / "kernel", "sid", ["linux-[0-9]"])
    with pytest.raises(Skip, match="no package of sid matches bsd any more"):
        archive.fetch(tmp_path / "kernel", "sid", ["bsd"])
    assert not (tmp_path / "kernel").exists()


def test_image_and_listed_modules_are_kept(tmp_path):
    lib = tmp_path / "root/lib/modules"
    lib.mkdir(parents=True)
    (tmp_path / "root/boot").mkdir()
    (tmp_path / "root/boot/vmlinuz-1").write_bytes(b"image")
    (lib / "a.ko").write_bytes(b"A")
    (lib / "b-c.ko.xz").write_bytes(lzma.compress(b"B"))
    (lib / "other.ko").write_bytes(b"O")
    kernel = kernels.Kernel("k", "run", "sid", ("p",))
    kernels.take_image_and_modules(kernel, tmp_path, ["b-c", "a", "built-in"])
    assert (tmp_path / "vmlinuz").read_bytes() == b"image"
    assert {file.name: file.read_bytes() for file in (tmp_path / "modules").iterdir()} == {"a.ko": b"A", "b-c.ko": b"B"}
    assert (tmp_path / "wanted").read_text() == "a\nb-c\nbuilt-in\n"
    assert not (tmp_path / "root").exists()


def test_packages_without_an_image_are_a_reason(tmp_path):
    (tmp_path / "root").mkdir()
    with pytest.raises(Skip, match="the packages of k have no kernel image"):
        kernels.take_image_and_modules(kernels.Kernel("k", "run", "sid", ("p",)), tmp_path, [])


def test_an_option_that_make_left_out_is_found():
    fragment = "# why\nCONFIG_A=y\nCONFIG_B=m\n"
    assert kernels.missing_options(fragment, "CONFIG_A=y\nCONFIG_B=m\n") == []
    assert kernels.missing_options(fragment, "CONFIG_A=y\n# CONFIG_B is not set\n") == ["CONFIG_B=m"]


# ---- the initramfs ----


def read_cpio(data):
    """The entries of a newc archive: {name: (mode, content)}, in order."""
    entries, at = {}, 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name_start, name_len = at + 110, fields[11]
        assert data[name_start + name_len - 1] == 0
        name = data[name_start : name_start + name_len - 1].decode()
        start = (name_start + name_len + 3) & ~3
        if name == "TRAILER!!!":
            assert start == len(data)
            return entries
        assert name not in entries
        entries[name] = (fields[1], data[start : start + fields[6]])
        at = (start + fields[6] + 3) & ~3


def test_an_archive_is_what_the_kernel_reads(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    out = io.BytesIO()
    files = [("init", 0o755, b"#!"), ("a/b/c", 0o644, file), ("a/b/empty", 0o644, b""), ("a/d", 0o600, b"dddd")]
    initramfs.write_cpio(out, files)
    entries = read_cpio(out.getvalue())
    # A directory comes before what is in it, and once.
    assert list(entries) == ["init", "a", "a/b", "a/b/c", "a/b/empty", "a/d"]
    assert entries["a"] == (stat.S_IFDIR | 0o755, b"")
    assert entries["init"] == (stat.S_IFREG | 0o755, b"#!")
    assert entries["a/b/c"] == (stat.S_IFREG | 0o644, b"12345")
    assert entries["a/d"] == (stat.S_IFREG | 0o600, b"dddd")


def test_the_libraries_of_a_program_are_found():
    ldd = (
        "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n"
    )
    assert initramfs.libraries(ldd) == ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]


def test_a_program_that_is_none_is_a_failure(tmp_path):
    text = tmp_path / "text"
    text.write_text("x")
    with pytest.raises(Failed, match="strip .*text"):
        initramfs.program_files({"text": text}, tmp_path, is_static=False)
    assert initramfs.program_files({"t": text}, tmp_path, is_static=True) == [("tests/t", 0o755, text)]


# ---- command lines ----


def test_a_stock_kernel_runs_every_stage_and_a_built_one_both_backends():
    stock, _, built = kernels.parse_kernels(KERNELS)
    lines = suites.suite_lines(stock, "")
    assert [line.split()[:3] for line in lines] == [
        ["bare", "bare", "kernel"], ["untyped", "untyped", "kernel"], ["vfio", "devices", "kernel"],
        ["unit", "devices", "unit"], ["heaps", "devices", "mem"],
    ]  # fmt: skip
    assert all("--show-output" in line for line in lines)
    # What reads an IOMMU's registers runs where they can be read, with each IOMMU of a PC.
    assert not any("page_tables" in line for line in lines)
    assert suites.iommu_line(stock, "", qemu.IOMMUS["vtd48"]) == lines[2]
    assert suites.iommu_line(stock, "", qemu.AMD) == f"{lines[2]} --skip dma_after_unmap"
    lines = suites.suite_lines(built, "name")
    assert all("--skip page_tables::" in line for line in lines[:2])
    assert [line.split()[0] for line in lines] == ["iommufd", "type1", "unit", "heaps"]
    assert lines[0].split()[2:4] == ["../bin/env", "DMALANE_VFIO_BACKEND=iommufd"]
    assert [line.split()[-1] for line in lines] == ["name", "name", "name", "heap::tests::name"]


def test_instrumented_programs_leave_counts_which_the_guest_prints_last():
    _, _, built = kernels.parse_kernels(KERNELS)
    plain = suites.suite_lines(built, "")
    *counted, pack, out = (line.split() for line in profiles.lines(plain))
    variable = "LLVM_PROFILE_FILE=/tmp/%p.profraw"
    assert counted[0][2:6] == ["../bin/env", variable, "DMALANE_VFIO_BACKEND=iommufd", "/tests/kernel"]
    assert counted[2][:5] == ["unit", "devices", "../bin/env", variable, "/tests/unit"]
    assert [line[5:] for line in counted[2:]] == [line.split()[3:] for line in plain[2:]]
    # Of a stage that every kernel has, behind all others of it.
    assert (pack[1], out[:2]) == ("devices", [profiles.SUITE, "devices"])


def test_the_rows_of_the_bar_map_table(tmp_path):
    found = settings(tmp_path, DMALANE_VM_GIB="1 32", DMALANE_VM_ALIGN="auto none", DMALANE_VM_ROUNDS="2")
    lines, devices = suites.bar_map_lines(found, ("type1",))
    assert [line.split()[0] for line in lines] == [
        "type1-1-auto", "type1-1-none", "type1-32-auto", "type1-32-none", *(f"none-again-{i}" for i in range(1, 6)),
    ]  # fmt: skip
    assert devices == ["-device", "pci-testdev,membar=1G,addr=0x10", "-device", "pci-testdev,membar=32G,addr=0x11"]
    # The device that a line names is the one of its size.
    assert "0000:00:11.0" in lines[2] and "0000:00:10.0" in lines[-1]


def test_the_machines_have_what_the_tests_drive(tmp_path):
    devices = qemu.suite_devices(tmp_path)
    size = (tmp_path / "disk").stat().st_size
    assert size == 8_000_000 and size % 512 == 0, "a disk is whole sectors"
    assert [word.partition(",")[0] for word in devices if word.startswith("edu")] == ["edu", "edu"]
    x86 = qemu.x86(Path("/k/vmlinuz"), tmp_path, devices)
    arm = qemu.arm64(Path("/k/vmlinuz"), tmp_path, devices)
    for command in (x86, arm):
        assert command[command.index("-kernel") + 1] == "/k/vmlinuz"
        assert command[command.index("-initrd") + 1] == f"{tmp_path}/initramfs"
        assert f"file:{tmp_path}/console.log" in command
        assert command[-len(devices) :] == devices
        assert all(isinstance(word, str) for word in command)
    assert f"file:{tmp_path}/tests.log" in x86
    assert qemu.INTEL in x86 and qemu.IOMMUS["amd"] in qemu.x86("/k", tmp_path, [], iommu=qemu.IOMMUS["amd"])
    assert "tests=ttyS0" in arm[arm.index("-append") + 1].split()
    program, env = newer_qemu.program(tmp_path)
    command = qemu.served(program, "/k/vmlinuz", tmp_path, "/s/card")
    assert command[0].endswith("ld-linux-x86-64.so.2") and list(env) == ["QEMU_MODULE_DIR"]
    assert json.loads(command[-1]) == {"driver": "vfio-user-pci", "socket": {"type": "unix", "path": "/s/card"}}


# ---- running ----


def test_a_guest_that_takes_too_long_is_ended(tmp_path):
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", f"import os,time; open({str(pid)!r},'w').write(str(os.getpid())); time.sleep(600)"]
    looked = []
    with pytest.raises(Failed, match="qemu was stopped after 1 s"):
        qemu.boot("k", command, tmp_path, 1, watch=lambda: looked.append(1))
    assert looked
    assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.parametrize(("code", "message"), [("raise SystemExit(3)", "status 3"), ("os.abort()", "by SIGABRT")])
def test_how_qemu_ended_is_said(tmp_path, code, message):
    with pytest.raises(qemu.QemuFailed, match=message):
        qemu.boot("k", [sys.executable, "-c", f"import os; print('no device'); {code}"], tmp_path, 60)
    if "System" in code:
        assert (tmp_path / "qemu.log").read_text() == "no device\n"


GUEST = """\
VM kernel 6.12.1\r
VM begin vfio\r
test maps ... ok\r
VM check bar 4 0aFF writes_arrive\r
VM check bar 4 0aFF writes_arrive\r
VM kill card\r
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\r
VM end vfio 0\r
VM done\r
"""


def test_what_a_guest_said_reads_like_cargo_test():
    outcome = report.read("k", GUEST)
    assert outcome.passed
    assert outcome.lines[:3] == ["Linux 6.12.1", "     Running k:vfio", "test maps ... ok"]
    assert not any(line.startswith("VM ") for line in outcome.lines)
    assert outcome.checks == [("bar", 4, b"\x0a\xff", "writes_arrive")]


@pytest.mark.parametrize(
    ("old", "new", "failed_test"),
    [
        ("VM end vfio 0", "VM end vfio 101", None),
        ("VM done", "VM failed insmod vfio\nVM done", None),
        ("VM done", "", "guest_ran_to_its_end"),
        ("VM end vfio 0\r\nVM done", "", "vfio_ran_to_its_end"),
        (GUEST, "VM kernel 6\nVM done\n", "guest_ran_to_its_end"),
        (GUEST, "", "guest_ran_to_its_end"),
    ],
)
def test_a_guest_that_failed_is_seen(old, new, failed_test):
    outcome = report.read("k", GUEST.replace(old, new))
    assert not outcome.passed
    failed = [line for line in outcome.lines if line.endswith(" ... FAILED")]
    assert failed == ([f"test {failed_test} ... FAILED"] if failed_test else [])


@pytest.mark.parametrize(("content", "passed"), [(b"1234\x0a\xff", True), (b"1234\x0a\xfe", False), (None, False)])
def test_bytes_that_only_the_host_sees_are_compared(tmp_path, capsys, content, passed):
    (tmp_path / "tests.log").write_text(GUEST)
    (tmp_path / "console.log").write_text("the kernel's log\n")
    (tmp_path / "qemu.log").write_text("")
    if content is not None:
        (tmp_path / "bar").write_bytes(content)
    assert report.show("k", tmp_path) == passed
    printed = capsys.readouterr().out
    assert f"test writes_arrive ... {'ok' if passed else 'FAILED: bytes at 4 of bar'}" in printed
    assert ("the kernel's log" in printed) == (not passed)


def archive(**contents):
    """What a guest prints of files, by name without their ending."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"{name}.profraw")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return base64.encodebytes(packed.getvalue()).decode()


def guest_with_counts(text):
    return GUEST.replace("VM done", f"VM begin profiles\n{text}VM end profiles 0\nVM done").replace("VM check", "#")


def test_counts_are_kept_and_not_shown(tmp_path, capsys):
    counts = tmp_path / "counts"
    counts.mkdir()
    (counts / "guest-k-9.profraw").write_bytes(b"of an earlier run")
    (counts / "host-9.profraw").write_bytes(b"host")
    text = archive(_71=bytes(range(256)) * 9, _72=b"")
    (tmp_path / "tests.log").write_text(guest_with_counts(text).replace("\n", "\r\n"))
    assert report.show("k", tmp_path, counts)
    printed = capsys.readouterr().out
    assert "counts of 2 programs" in printed and text.splitlines()[0] not in printed
    found = {file.name: file.read_bytes() for file in counts.iterdir()}
    assert found == {
        "guest-k-_71.profraw": bytes(range(256)) * 9, "guest-k-_72.profraw": b"", "host-9.profraw": b"host",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (archive(), "no program of the guest left counts"),
        (archive(_1=bytes(9999))[:-60] + "\n", "did not arrive whole"),
        ("not base64!\n", "did not arrive whole"),
        ("", "did not arrive whole"),
    ],
    # An archive holds the time: processes that collect the tests would call them by other names.
    ids=["none", "cut", "other", "empty"],
)
def test_counts_that_do_not_arrive_are_a_failure(tmp_path, capsys, text, why):
    (tmp_path / "tests.log").write_text(guest_with_counts(text))
    assert not report.show("k", tmp_path, tmp_path)
    assert why in capsys.readouterr().out
    assert not list(tmp_path.glob("*.profraw"))


def artifact(package_id, target, path, test=True):
    message = {"reason": "compiler-artifact", "package_id": package_id, "target": {"name": target}, "executable": path}
    return json.dumps(message | {"profile": {"test": test}})


def test_test_binaries_are_found_by_package_and_target():
    messages = [
        artifact("path+file:///w/crates/vfio#dmalane-vfio@0.1.0", "kernel", "/kernel"),
        artifact("path+file:///w/crates/dmalane#0.1.0", "dmalane", "/lib"),
        artifact("path+file:///w/crates/dmalane#0.1.0", "dmalane", "/program", test=False),
        artifact("path+file:///w/crates/dma#dmalane-dma@0.1.0", "dmalane_dma", None),
        '{"reason": "build-finished"}', "warning: not JSON",
    ]  # fmt: skip
    found = binaries.executables("\n".join(messages))
    assert found == {("dmalane-vfio", "kernel"): "/kernel", ("dmalane", "dmalane"): "/lib"}


def test_the_model_file_is_the_one_of_the_python_tests():
    known = served.constants(ROOT / "tests/python/conftest.py")
    assert {"PACKAGE", "VERSION", "WHEEL_SHA256", "MEMBER"} <= known.keys()


# ---- tables ----


def test_the_table_of_bars(tmp_path):
    def runs(*times):
        return [{"map_ns": map_ns, "unmap_ns": unmap_ns} for map_ns, unmap_ns in times]

    def one(align, *times, kernel="6.12.1"):
        bar = {"bytes": 1 << 30, "method": "type1", "alignment": 2 << 20, "runs": runs(*times)}
        report = {"kernel": kernel, "align": align, "bars": [bar]}
        return f"VM begin x\n{json.dumps(report, indent=1)}\nVM end x 0\n"

    log = tmp_path / "log"
    log.write_text(one("auto", (2e6, 1e6), (1e6, 1e6)) + one("none", (40e6, 1e6), (30e6, 2e6)))
    lines = list(tables.bar_map([log]))
    assert lines[2] == "| 6.12 | 1 GiB | type1 | auto | 2 MiB | 2.000 | 1.000 | 1.000 | 2 | 5.000 |"
    assert lines[3] == "| 6.12 | 1 GiB | type1 | none | 2 MiB | 40 | 30 | 1.000 | 2 | 73 |"
    assert "20.00 times the instructions of auto at first, 30.00 times later, 14.60 times for all" in lines[-1]
    log.write_text(one("auto", (2e6, 1e6), (1e6, 1e6), kernel="7.2.1"))
    with pytest.raises(Failed, match="Linux 7.2, 1 GiB, type1: aligned, and a map takes 1.000 ms"):
        list(tables.bar_map([log]))
    log.write_text("VM begin x\nno such device\nVM end x 3\n")
    with pytest.raises(Failed, match="(?s)VM end x 3.*no such device"):
        list(tables.bar_map([log]))


def test_the_table_of_reads(tmp_path):
    found = settings(tmp_path, DMALANE_VM_SIZES="4096 8192", DMALANE_VM_ROUNDS="3")
    lines, extra = suites.alloc_read_lines(found)
    assert [line.split()[0] for line in lines] == ["folder", "disk", "limit", "alloc-read-4096", "alloc-read-8192"]
    assert "--sizes 8192 " in lines[-1] and "--rounds 3 " in lines[-1] and extra[0][0] == "limit"

    def one(size, *rows):
        rows = [{"case": case, "variant": name, "median_s": s, "samples": 3} for case, name, s in rows]
        return f"VM begin x\nbench: slow\n{json.dumps({'rows': rows}, indent=1)}\nVM end x 0\n"

    log = tmp_path / "log"
    small = one(4096, ("4 KB cold", "normal", 0.0015), ("4 KB warm", "normal", 1), ("4 KB cold", "ours", 0.0005))
    log.write_text("VM begin disk\nVM end disk 0\n" + small + one(8192, ("8 KB cold", "normal", 2)))
    assert list(tables.alloc_read([log])) == [
        "| cold | 4 KB | 8 KB |", "|---|---|---|", "| normal | 1,500,000 | 2,000,000,000 |", "| ours | 500,000 | - |",
        "", "Rounds: 3, 3.",
    ]  # fmt: skip


def test_the_table_of_host_memory(tmp_path):
    log = tmp_path / "log"
    row = {"kernel": "7.2", "memory": "2 MiB", "call": "map", "first_ns": 12_340_000, "map_ns": 5e5, "unmap_ns": 1e6}
    log.write_text(f"noise\nx ROW {json.dumps(row)}\n")
    assert list(tables.dma_map([log]))[-1] == "| 7.2 | 2 MiB | `map` | 12.3 | 0.500 | 1.000 |"
    log.write_text("noise\n")
    with pytest.raises(Failed, match="no rows"):
        list(tables.dma_map([log]))


# ---- the script ----


def test_guests_run_side_by_side_and_end_together(tmp_path):
    def guest(number, code):
        return qemu.Guest(str(number), [sys.executable, "-c", code], tmp_path, 60)

    # Neither ends before both have begun.
    meet = "import os,sys,time; open('{}','w'); \nwhile not os.path.exists('{}'): time.sleep(.01)"
    paths = tmp_path / "a", tmp_path / "b"
    both = [guest(1, meet.format(*paths)), guest(2, meet.format(*reversed(paths)))]
    assert {one.name for one in qemu.run(both)} == {"1", "2"}
    assert [one.failure for one in both] == [None, None]
    # Whoever stops looking ends the others.
    guests = [guest(0, ""), guest(1, "import time; time.sleep(600)")]
    for one in qemu.run(guests):
        assert one.name == "0"
        break
    assert guests[1].process.returncode == -signal.SIGTERM


LIBRARIES = {"libvulkan_lvp.so", "libVkLayer_khronos_validation.so", "libvulkan.so.1"}


def unpacked_mesa(folder):
    """As mesa.fetch leaves it, without contents; gives the folder of the libraries."""
    lib = folder / "root/usr/lib/x86_64-linux-gnu"
    lib.mkdir(parents=True)
    (folder / "versions").write_text("26.2\n")
    # In place of the dynamic loader, which lists what a library needs: one each, and one for all.
    listing = ["for n in (sys.argv[-1] + '.1', sys.argv[2] + '/libc.so.6'):", "    print(f'\\tx => {n} (0x7f)')"]
    fake_program(lib, "ld-linux-x86-64.so.2", listing)
    for name in LIBRARIES:
        (lib / name).touch()
        (lib / f"{name}.1").touch()
    (lib / "libc.so").touch()
    (lib / "libc.so.6").symlink_to("libc.so")
    for file, part in [("icd.d/lvp_icd.json", "ICD"), (f"explicit_layer.d/{mesa.LAYER}", "layer")]:
        path = folder / "root/usr/share/vulkan" / file
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({part: {"library_path": "elsewhere.so"}}))
    return lib


class Script:
    """scripts/vm with a cache that has a kernel and a Mesa, a cargo that builds nothing, and a QEMU that says what it
    is told."""

    KERNEL = "6.12"

    def __init__(self, folder, programs):
        self.folder, self.programs, self.cache = folder, programs, folder / "cache"
        kernel = self.cache / self.KERNEL
        (kernel / "modules").mkdir(parents=True)
        (kernel / "modules/vfio.ko").write_bytes(b"module")
        (kernel / "vmlinuz").write_bytes(b"image")
        (kernel / "versions").write_text("linux_6.12.deb\n")
        (kernel / "wanted").write_text(kernels.wanted(kernels.all_modules()))
        busybox = self.cache / "busybox/root/bin/busybox"
        busybox.parent.mkdir(parents=True)
        busybox.write_bytes(b"busybox")
        unpacked_mesa(self.cache / "mesa")
        built = [("vfio", "kernel"), ("vfio", "dmalane_vfio"), ("dma", "dmalane_dma"), ("cli", "it")]
        built += [("slash", "kernel"), ("slash", "dmalane_slash"), ("vulkan", "dmalane_vulkan")]
        messages = [artifact(f"path+file:///w#dmalane-{name}@0.1.0", target, sys.executable) for name, target in built]
        fake_program(programs, "cargo", [f"print({chr(10).join(messages)!r})"])

    def qemu(self, *lines):
        """The guest's text is in `said`; it goes where `-serial` says."""
        fake_program(
            self.programs,
            "qemu-system-x86_64",
            [
                "ports = [word.removeprefix('file:') for word in sys.argv if word.startswith('file:')]",
                "def say(text): open(ports[1], 'w').write(text); open(ports[0], 'w').write('the kernel\\n')",
                *lines,
            ],
        )

    def command(self, *args):
        return [sys.executable, ROOT / "scripts/vm", *args]

    def env(self, **env):
        return os.environ | {"DMALANE_VM_CACHE": str(self.cache)} | env

    def run(self, *args, **env):
        return subprocess.run(
            self.command(*args), env=self.env(**env),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip


@pytest.fixture
def script(tmp_path, programs):
    return Script(tmp_path, programs)


def test_the_script_runs_a_guest_and_reports(script):
    script.qemu(
        f"say({GUEST!r})",
        "bar = next(word for word in sys.argv if 'mem-path=' in word).split('mem-path=')[1].split(',')[0]",
        "open(bar, 'wb').write(b'1234\\x0a\\xff')",
        "initrd = sys.argv[sys.argv.index('-initrd') + 1]",
        f"os.rename(initrd, {str(script.folder / 'kept')!r})",
    )
    done = script.run("run", "6.12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== kernel 6.12: linux_6.12.deb\n" in done.stdout
    assert "test maps ... ok\n" in done.stdout and "test writes_arrive ... ok\n" in done.stdout
    assert "test slash_stub_6.12 ... ignored, no package of Debian's, so no headers\n" in done.stdout
    entries = read_cpio((script.folder / "kept").read_bytes())
    assert entries["modules/order"][1] == b"vfio\n" and entries["modules/vfio.ko"][1] == b"module"
    assert {"init", "bin/busybox", "suites", "tests/kernel", "tests/unit", "tests/mem"} <= entries.keys()
    assert {"tests/vulkan", "mesa/libvulkan_lvp.so", "mesa/lvp.json"} <= entries.keys()
    assert b"\nvulkan devices " in entries["suites"][1] and b"\ndaemon devices " in entries["suites"][1]
    assert entries["init"][0] == stat.S_IFREG | 0o755
    assert any(name.endswith("/libc.so.6") for name in entries)


def test_the_script_fails_with_a_guest_that_dies(script):
    script.qemu("say('VM kernel 6.12\\nVM begin vfio\\n')", "print('qemu: no memory')", "sys.exit(1)")
    done = script.run("run", "6.12")
    assert done.returncode == 1
    for text in ["qemu ended with status 1", "vfio_ran_to_its_end ... FAILED", "the kernel\n", "qemu: no memory"]:
        assert text in done.stdout


def test_the_script_fails_where_cargo_fails(script):
    script.qemu()
    fake_program(script.programs, "cargo", ["sys.exit(101)"])
    done = script.run("run", "6.12")
    assert done.returncode == 1
    assert "exit status 101" in done.stdout
    fake_program(script.programs, "cargo", [])
    done = script.run("run", "6.12")
    assert done.returncode == 1
    assert "cargo built no test dmalane-vfio kernel" in done.stdout


def test_the_script_skips_a_kernel_that_cannot_be_had(script):
    script.qemu(f"say({GUEST.replace('VM check', '#')!r})")
    fake_program(script.programs, "apt-get", ["sys.exit(100)"])
    done = script.run("run", "6.12", "7.2", DMALANE_VM_MIRROR="http://deb.example")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test kernel_7.2 ... ignored, " in done.stdout and "test maps ... ok" in done.stdout
    # Where nothing ran, the part is skipped, with the reasons last.
    done = script.run("run", "7.2", DMALANE_VM_MIRROR="http://deb.example")
    assert done.returncode == 77
    assert done.stdout.splitlines()[-1].startswith("SKIPPED: kernel 7.2: ")


def test_the_script_runs_the_rest_without_mesa(script):
    script.qemu(f"say({GUEST.replace('VM check', '#')!r})")
    fake_program(script.programs, "apt-get", ["sys.exit(100)"])
    (script.cache / "mesa/versions").unlink()
    done = script.run("run", "6.12", DMALANE_VM_MIRROR="http://deb.example")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test vulkan_dma_bufs ... ignored, " in done.stdout and "test maps ... ok" in done.stdout


def test_the_script_skips_without_qemu(script, monkeypatch):
    monkeypatch.setenv("PATH", str(script.programs))
    done = script.run("run")
    assert (done.returncode, done.stdout) == (77, "SKIPPED: no qemu-system-x86_64 (Debian: qemu-system-x86)\n")


def test_the_script_refuses_what_it_does_not_know(script):
    assert script.run("boot").returncode == 2
    assert script.run().returncode == 2
    done = script.run("run", "6.1")
    assert (done.returncode, done.stderr) == (2, "scripts/vm: tests/vm/kernels has no 6.1\n")


def test_a_guest_ends_with_the_script(script):
    pid = script.folder / "pid"
    script.qemu(f"open({str(pid)!r}, 'w').write(str(os.getpid()))", "time.sleep(600)")
    process = subprocess.Popen(script.command("run", "6.12"), env=script.env(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (pid.is_file() and pid.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_the_card_is_killed_once_when_the_guest_asks(tmp_path):
    fake_program(
        tmp_path,
        "dmalane",
        [
            "import socket",
            "server = socket.socket(socket.AF_UNIX)",
            "server.bind(sys.argv[sys.argv.index('--vfio-user') + 1])",
            "time.sleep(600)",
        ],
    )
    with served.Card(tmp_path / "dmalane", tmp_path) as card:
        card.obey()
        assert card.process.poll() is None and not card.killed
        card.tests.write_text("VM begin killed\nVM kill card\n")
        card.obey()
        assert card.process.wait(timeout=10) == -signal.SIGKILL
        card.obey()
        assert card.killed
    fake_program(tmp_path, "dmalane", ["print('no such option', flush=True)"])
    with pytest.raises(Failed, match="(?s)does not start.*no such option"), served.Card(tmp_path / "dmalane", tmp_path):
        pass


def test_programs_start_with_the_mesa_that_was_unpacked(tmp_path):
    root = tmp_path / "root"
    with pytest.raises(Skip, match="no dynamic loader"):
        mesa.started(tmp_path, ["true"])
    lib = root / "usr/lib/x86_64-linux-gnu"
    lib.mkdir(parents=True)
    (lib / "ld-linux-x86-64.so.2").touch()
    with pytest.raises(Skip, match="no lavapipe"):
        mesa.started(tmp_path, ["true"])
    for file, part in [("icd.d/lvp_icd.json", "ICD"), (f"explicit_layer.d/{mesa.LAYER}", "layer")]:
        path = root / "usr/share/vulkan" / file
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({part: {"library_path": "elsewhere.so"}}))
    command, environment = mesa.started(tmp_path, ["program", "argument"])
    assert command == [f"{lib}/ld-linux-x86-64.so.2", "--library-path", f"{lib}", "program", "argument"]
    driver = json.loads(Path(environment["VK_DRIVER_FILES"]).read_text())
    assert driver["ICD"]["library_path"] == f"{lib}/libvulkan_lvp.so"
    layer = json.loads((Path(environment["VK_LAYER_PATH"]) / mesa.LAYER).read_text())
    assert layer["layer"]["library_path"] == f"{lib}/libVkLayer_khronos_validation.so"


def test_a_guest_has_what_the_driver_and_the_layers_are_linked_with(tmp_path):
    lib = unpacked_mesa(tmp_path)
    files = {path: content for path, _, content in mesa.guest_files(tmp_path)}
    expected = {*LIBRARIES, *(f"{name}.1" for name in LIBRARIES), "libc.so.6", "ld-linux-x86-64.so.2"}
    assert files.keys() == {f"mesa/{name}" for name in {*expected, "lvp.json", mesa.LAYER}}
    assert files["mesa/libc.so.6"] == lib / "libc.so", "the file, not the link"
    assert json.loads(files["mesa/lvp.json"])["ICD"]["library_path"] == "/mesa/libvulkan_lvp.so"
    assert "/mesa/libVkLayer" in json.loads(files[f"mesa/{mesa.LAYER}"])["layer"]["library_path"]
    fake_program(lib, "ld-linux-x86-64.so.2", ["sys.exit('not found: libx.so')"])
    with pytest.raises(Skip, match="of Mesa's packages: not found: libx.so"):
        mesa.guest_files(tmp_path)


def test_a_guest_with_mesa_may_skip_no_test_of_dma_bufs():
    every = suites.vulkan_lines("")
    assert [line.split()[:3] for line in every] == [
        ["vulkan", "devices", "../bin/env"], ["read-memfd", "devices", "../bin/env"],
        ["read-dma-heap", "devices", "../bin/env"], ["vulkan-kept", "devices", "../bin/env"],
    ]  # fmt: skip
    assert all("DMALANE_NEED_DMA_BUF=1" in line and "/mesa/ld-linux-x86-64.so.2" in line for line in every)
    [only] = suites.vulkan_lines("name")
    assert only.split()[-1] == "dma_buf::name"


def test_mesa_says_how_it_is_used(capsys):
    assert mesa.main([]) == 2 and mesa.main(["--help"]) == 2
    assert "scripts/mesa test" in capsys.readouterr().err
