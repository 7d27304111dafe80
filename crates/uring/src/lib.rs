//! Files as a Channel over io_uring, with direct I/O where the file system allows it
