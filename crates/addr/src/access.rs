//! What a mapping permits.

bitflags::bitflags! {
    /// What a device may do through a mapping.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct Access: u8 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 2;
        /// A program on the device may be fetched from here. Formats without the bit ignore it.
        const EXEC = 4;
    }
}

impl Access {
    /// Read and write.
    pub const RW: Self = Self::READ.union(Self::WRITE);
}

impl core::fmt::Display for Access {
    /// Three letters, as in `/proc/PID/maps`: `rw-`.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (bit, letter) in [(Self::READ, 'r'), (Self::WRITE, 'w'), (Self::EXEC, 'x')] {
            write!(f, "{}", if self.contains(bit) { letter } else { '-' })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters() {
        assert_eq!(alloc::format!("{} {}", Access::RW, Access::EXEC), "rw- --x");
    }
}
