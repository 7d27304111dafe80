//! Lists of addresses that calls make: vectors, or arrays without `alloc`.

use dmalane_addr::Address;

/// Addresses of tables, or of what they translate.
#[cfg(feature = "alloc")]
pub(crate) type List<A> = alloc::vec::Vec<A>;

/// Addresses that a call can list without `alloc`.
#[cfg(not(feature = "alloc"))]
const ROOM: usize = 32;

/// Addresses of tables, or of what they translate.
#[cfg(not(feature = "alloc"))]
#[derive(Debug)]
pub(crate) struct List<A> {
    all: [A; ROOM],
    len: usize,
}

/// Appends; false where there is no room.
#[cfg(feature = "alloc")]
pub(crate) fn push<A: Address>(list: &mut List<A>, addr: A) -> bool {
    list.push(addr);
    true
}

/// Appends; false where there is no room.
#[cfg(not(feature = "alloc"))]
pub(crate) fn push<A: Address>(list: &mut List<A>, addr: A) -> bool {
    let slot = list.all.get_mut(list.len);
    list.len += usize::from(slot.is_some());
    slot.map(|slot| *slot = addr).is_some()
}

#[cfg(not(feature = "alloc"))]
impl<A: Address> List<A> {
    pub(crate) fn new() -> Self {
        Self { all: [A::new(0); ROOM], len: 0 }
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Always fine: what finds no room is not listed.
    pub(crate) fn try_reserve(&mut self, _: usize) -> Result<(), core::convert::Infallible> {
        Ok(())
    }

    pub(crate) fn pop(&mut self) -> Option<A> {
        self.len = self.len.checked_sub(1)?;
        Some(self.all[self.len])
    }
}

#[cfg(not(feature = "alloc"))]
impl<A> core::ops::Deref for List<A> {
    type Target = [A];

    fn deref(&self) -> &[A] {
        &self.all[..self.len]
    }
}
