//! Access rights and memory attributes of a mapping.

bitflags::bitflags! {
    /// Access rights of a device through a mapping, and the kind of memory behind it.
    ///
    /// A page-table format refuses what it has no bits for. Memory without an attribute is what most mappings want:
    /// ordinary memory, cached where the format says anything about caches.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct Access: u8 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 2;
        /// The device may fetch instructions. Formats without such a bit refuse it.
        const EXEC = 4;
        /// Privileged accesses only: the rights are theirs, and unprivileged accesses fault (Linux: `IOMMU_PRIV`).
        const PRIVILEGED = 8;
        /// Ordinary memory that is not cached (Arm: normal, non-cacheable).
        const UNCACHED = 16;
        /// Registers of a device: not cached, not merged, not reordered, no speculative reads (Linux: `IOMMU_MMIO`;
        /// Arm: Device-nGnRE).
        const MMIO = 32;
    }
}

impl Access {
    /// Read and write.
    pub const RW: Self = Self::READ.union(Self::WRITE);
    /// Read, write and execute: what an access can ask for. The other bits are attributes.
    pub const RIGHTS: Self = Self::RW.union(Self::EXEC);

    /// The rights without the attributes.
    pub const fn rights(self) -> Self {
        self.intersection(Self::RIGHTS)
    }

    /// True when the kind of memory makes sense: at most one of [`UNCACHED`](Self::UNCACHED) and
    /// [`MMIO`](Self::MMIO), and no instructions in registers.
    pub const fn is_consistent(self) -> bool {
        !self.contains(Self::MMIO) || !self.intersects(Self::EXEC.union(Self::UNCACHED))
    }

    /// True when `self` permits everything that `other` requests: all its rights, and as an unprivileged
    /// access unless `other` is privileged. Kinds of memory do not matter.
    pub const fn permits(self, other: Self) -> bool {
        self.contains(other.rights()) && (other.contains(Self::PRIVILEGED) || !self.contains(Self::PRIVILEGED))
    }
}

/// The rights by letter.
const LETTERS: [(Access, char); 3] = [(Access::READ, 'r'), (Access::WRITE, 'w'), (Access::EXEC, 'x')];
/// The attributes by word.
const WORDS: [(Access, &str); 3] =
    [(Access::PRIVILEGED, "privileged"), (Access::UNCACHED, "uncached"), (Access::MMIO, "mmio")];

impl core::fmt::Display for Access {
    /// Three letters, as in `/proc/PID/maps`, then the attributes: `rw-`, `rw-,mmio`.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (bit, letter) in LETTERS {
            write!(f, "{}", if self.contains(bit) { letter } else { '-' })?;
        }
        WORDS.iter().filter(|(bit, _)| self.contains(*bit)).try_for_each(|(_, word)| write!(f, ",{word}"))
    }
}

/// Error of parsing a text as [`Access`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NotAccess;

impl core::fmt::Display for NotAccess {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("not letters out of \"rwx\", then any of \",privileged\", \",uncached\", \",mmio\"")
    }
}

impl core::error::Error for NotAccess {}

impl core::str::FromStr for Access {
    type Err = NotAccess;

    /// Parses letters out of `rwx`, each at most once and at least one, where `-` stands for an omitted letter; then
    /// attributes, each at most once: `rw`, `r-x,privileged`, `rw,mmio`.
    fn from_str(text: &str) -> Result<Self, NotAccess> {
        let mut access = Self::empty();
        let mut add = |bit: Option<Self>| match bit {
            Some(bit) if !access.contains(bit) => {
                access |= bit;
                Ok(())
            }
            _ => Err(NotAccess),
        };
        let mut words = text.split(',');
        for c in words.next().unwrap_or_default().chars().filter(|c| *c != '-') {
            add(LETTERS.iter().find(|(_, letter)| *letter == c).map(|(bit, _)| *bit))?;
        }
        for word in words {
            add(WORDS.iter().find(|(_, name)| *name == word).map(|(bit, _)| *bit))?;
        }
        if access.rights().is_empty() { Err(NotAccess) } else { Ok(access) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_and_back() {
        for bits in (0..=Access::all().bits()).filter(|bits| bits & 7 != 0) {
            let access = Access::from_bits_truncate(bits);
            assert_eq!(alloc::string::ToString::to_string(&access).parse(), Ok(access));
        }
        assert_eq!(("rw".parse(), "xr".parse()), (Ok(Access::RW), Ok(Access::READ | Access::EXEC)));
        assert_eq!("r,mmio,privileged".parse(), Ok(Access::READ | Access::MMIO | Access::PRIVILEGED));
        for wrong in ["", "---", "rr", "R", "r w", "rwxs", ",mmio", "rw,", "rw,mmio,mmio", "rw,MMIO", "mmio", "rw mmio"]
        {
            assert_eq!(wrong.parse::<Access>(), Err(NotAccess), "{wrong:?}");
        }
    }

    #[test]
    fn letters() {
        assert_eq!(alloc::format!("{} {}", Access::RW, Access::EXEC), "rw- --x");
        assert_eq!(alloc::format!("{}", Access::RW | Access::MMIO | Access::PRIVILEGED), "rw-,privileged,mmio");
    }

    #[test]
    fn who_may_do_what() {
        let privileged = Access::RW | Access::PRIVILEGED;
        assert!(Access::RW.permits(Access::READ) && !Access::READ.permits(Access::RW));
        assert!(Access::RW.permits(privileged) && !privileged.permits(Access::READ) && privileged.permits(privileged));
        assert!(Access::RW.permits(Access::READ | Access::MMIO), "kinds of memory are not rights");
        assert!(!(Access::MMIO | Access::UNCACHED | Access::READ).is_consistent());
        assert!(!(Access::MMIO | Access::EXEC).is_consistent() && (Access::RW | Access::MMIO).is_consistent());
    }
}
