//! Access rights of a mapping.

bitflags::bitflags! {
    /// Access rights of a device through a mapping.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct Access: u8 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 2;
        /// The device may fetch instructions. Formats without such a bit ignore it.
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

/// Error of parsing a text as [`Access`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not letters out of \"rwx\"")]
pub struct NotAccess;

impl core::str::FromStr for Access {
    type Err = NotAccess;

    /// Parses letters out of `rwx`, each at most once and at least one; `-` stands for an omitted letter.
    fn from_str(text: &str) -> Result<Self, NotAccess> {
        let mut access = Self::empty();
        for c in text.chars() {
            let bit = match c {
                'r' => Self::READ,
                'w' => Self::WRITE,
                'x' => Self::EXEC,
                '-' => continue,
                _ => return Err(NotAccess),
            };
            if access.contains(bit) {
                return Err(NotAccess);
            }
            access |= bit;
        }
        if access.is_empty() { Err(NotAccess) } else { Ok(access) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_and_back() {
        for bits in 1..8 {
            let access = Access::from_bits_truncate(bits);
            assert_eq!(alloc::string::ToString::to_string(&access).parse(), Ok(access));
        }
        assert_eq!(("rw".parse(), "xr".parse()), (Ok(Access::RW), Ok(Access::READ | Access::EXEC)));
        for wrong in ["", "---", "rr", "R", "r w", "rwxs"] {
            assert_eq!(wrong.parse::<Access>(), Err(NotAccess), "{wrong:?}");
        }
    }

    #[test]
    fn letters() {
        assert_eq!(alloc::format!("{} {}", Access::RW, Access::EXEC), "rw- --x");
    }
}
