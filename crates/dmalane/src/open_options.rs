//! How a device is opened.

use dmalane_load::DriveOptions;

/// How a device is opened, whatever its kind. The options of one kind stand in its name.
#[derive(Clone, Default)]
pub struct OpenOptions {
    /// How it is driven.
    pub drive: DriveOptions,
    /// No page tables and no sparse binding, as with `,flat` in the name: addresses are card addresses, and all memory
    /// is for buffers. Other devices are so anyway, unless their name says otherwise (`cuda:0,vmm`).
    pub flat: bool,
    /// Memory may be allocated where a file or a block device that serves as device memory holds data.
    pub overwrite: bool,
    /// Operations that its user has in flight at a time, for a device that has a thread for each; `None` for what the
    /// kind chooses.
    pub threads: Option<usize>,
}
