//! Memory of a GPU, allocated by its driver.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmalane_addr::{CardAddr, Span};
use dmalane_device::MemoryDriver;

use crate::sys::{Context, Window};

/// Allocates memory in the window of the device's addresses.
pub(crate) struct Vram {
    pub(crate) context: Arc<Context>,
    pub(crate) window: Arc<Window>,
    /// Bytes of the pages in which memory is allocated; `None`: each allocation is one.
    pub(crate) page: Option<u64>,
    /// Whether it can be lent to other processes.
    pub(crate) lendable: Arc<AtomicBool>,
    /// Those that could not be freed, because work of the context had not ended or could not be waited for.
    pub(crate) stuck: Vec<Span<CardAddr>>,
}

impl MemoryDriver for Vram {
    fn allocate(&mut self, range: Span<CardAddr>) -> Result<(), Box<dyn Error + Send + Sync>> {
        let (window, page) = (&self.window, self.page.unwrap_or(range.len()));
        self.stuck.retain(|stuck| window.unmap(stuck.first().bits(), stuck.len()).is_err());
        let lendable = self.lendable.load(Ordering::Relaxed);
        window.map_new(range.first().bits(), range.len(), page, lendable).map_err(|e| match self.context.memory() {
            Ok((free, total)) if e.code() == 2 => {
                let text = format!("{e}; {free} bytes of the GPU's {total} are free; `nvidia-smi` shows who uses them");
                std::io::Error::new(std::io::ErrorKind::OutOfMemory, text).into()
            }
            _ => Box::<dyn Error + Send + Sync>::from(e),
        })?;
        Ok(())
    }

    fn free(&mut self, range: Span<CardAddr>) {
        // Memory that a stream may still use is not freed; that is tried again before the next allocation, and when the
        // device is closed.
        if self.window.unmap(range.first().bits(), range.len()).is_err() {
            self.stuck.push(range);
        }
    }

    fn free_bytes(&self) -> Option<u64> {
        self.context.memory().ok().map(|(free, _)| free)
    }
}
