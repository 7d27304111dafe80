//! Memory of a GPU for other processes.

use std::error::Error as StdError;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmalane_addr::{CardAddr, Span};
use dmalane_device::{Lending, LentMemory};

use crate::error::Error;
use crate::sys::{Context, Window};

/// Lends memory of a GPU, and takes what was lent.
pub(crate) struct Lender {
    pub(crate) context: Arc<Context>,
    pub(crate) lendable: Arc<AtomicBool>,
    pub(crate) uuid: String,
}

impl Lending for Lender {
    fn device(&self) -> &str {
        &self.uuid
    }

    fn allow(&self, lendable: bool) {
        self.lendable.store(lendable, Ordering::Relaxed);
    }

    fn lend(&self, memory: Span<CardAddr>) -> Result<Vec<(OwnedFd, u64)>, Box<dyn StdError + Send + Sync>> {
        Ok(vec![(self.context.lend(memory.first().bits(), memory.len())?, memory.len())])
    }

    fn take(&self, pieces: &[(BorrowedFd<'_>, u64)]) -> Result<LentMemory, Box<dyn StdError + Send + Sync>> {
        let [(memory, len)] = pieces else { return Err("memory of this device is lent in one piece".into()) };
        let window = Window::of_lent(&self.context, *memory, *len)?;
        let at = Span::new(CardAddr::new(window.at()), window.len()).ok_or(Error::NoMemory)?;
        Ok(LentMemory::new(at, window))
    }
}
