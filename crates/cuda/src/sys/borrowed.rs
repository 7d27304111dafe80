//! Memory of a GPU that another library of this process has allocated.

use std::sync::Arc;

use super::context::Context;
use super::ranges::{Range, overlaps};
use crate::Error;

/// `CUpointer_attribute`.
#[derive(Clone, Copy)]
enum Attribute {
    /// 2: device memory.
    MemoryType = 2,
    /// 1: memory that moves between host and device.
    IsManaged = 8,
    DeviceOrdinal = 9,
    RangeStart = 11,
    RangeSize = 12,
}

/// A range of memory that the context's queues may use until this is dropped.
pub(crate) struct Borrowed {
    context: Arc<Context>,
    at: u64,
}

impl Borrowed {
    /// Asks the driver whether all of it is memory of the context's GPU.
    pub(crate) fn new(context: &Arc<Context>, at: u64, len: u64) -> Result<Self, Error> {
        let end = at.checked_add(len).filter(|end| *end > at).ok_or(Error::NotAllocated(at))?;
        let mut mapped = context.mapped_mut();
        if overlaps(&mapped, at, len) {
            return Err(Error::Mapped(at));
        }
        let (driver, _current) = (context.driver, context.current()?);
        let mut next = at;
        while next < end {
            // Each is at most 8 bytes long; those that are shorter are the first of them.
            let ask = |attribute: Attribute| {
                let mut value = 0u64;
                call!(driver.pointer_attribute((&raw mut value).cast(), attribute as i32, next)).map(|()| value)
            };
            let number = |value: u64| value as u32;
            let is_here = number(ask(Attribute::MemoryType)?) == 2
                && number(ask(Attribute::IsManaged)?) & 0xff == 0
                && number(ask(Attribute::DeviceOrdinal)?) == context.ordinal();
            let behind = ask(Attribute::RangeStart)?.checked_add(ask(Attribute::RangeSize)?);
            let behind = behind.filter(|behind| is_here && *behind > next);
            next = behind.ok_or(Error::NotAllocated(next))?;
        }
        mapped.insert(at, Range { len, handle: None, lent: true, writable: true, closed: false });
        Ok(Self { context: context.clone(), at })
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.context.mapped_mut().remove(&self.at);
    }
}
