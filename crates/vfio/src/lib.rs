//! PCI devices through the kernel's VFIO.
#![deny(unsafe_code)] // allowed again in kernel/sys.rs, and nowhere else
