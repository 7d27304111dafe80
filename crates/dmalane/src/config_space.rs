//! The configuration space of a PCI function: registers of fixed bits and of bits that a write changes.

/// Bytes of the space of PCI 3.0.
pub(crate) const CONFIG_LEN: usize = 256;
/// The command register, and bits of its first byte: the function responds at its BARs; it may access memory and raise
/// interrupts.
pub(crate) const COMMAND: usize = 4;
pub(crate) const COMMAND_MEMORY: u8 = 1 << 1;
pub(crate) const COMMAND_MASTER: u8 = 1 << 2;
/// The bits of the command register that can be set: those two, and the reports of parity and system errors. No BAR is
/// of I/O space, and there is no interrupt pin.
const COMMAND_BITS: u16 = 0x0146;
/// The first BAR.
const BARS: usize = 0x10;

/// A memory BAR. Its length is a power of two of at least 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bar {
    /// There is none, or it is the upper half of the one before.
    None,
    /// A BAR of this length, below 4 GiB.
    Bits32(u32),
    /// A prefetchable BAR of this length, anywhere, which takes two registers.
    Bits64(u64),
}

/// The bytes of a configuration space, each with the bits that a write changes.
pub(crate) struct ConfigSpace {
    bytes: [u8; CONFIG_LEN],
    writable: [u8; CONFIG_LEN],
}

impl ConfigSpace {
    /// The space of a function of this vendor and device number, class (24 bits) and BARs. The error bits of the status
    /// register are never set, so writes of ones, which would clear them, change nothing.
    pub(crate) fn new(id: (u16, u16), class: u32, bars: [Bar; 6]) -> Self {
        let mut this = Self { bytes: [0; CONFIG_LEN], writable: [0; CONFIG_LEN] };
        this.put(0x00, &id.0.to_le_bytes());
        this.put(0x02, &id.1.to_le_bytes());
        this.allow(COMMAND, &COMMAND_BITS.to_le_bytes());
        // Revision 0.
        this.put(0x08, &(class << 8).to_le_bytes());
        // The size of a cache line, without effect.
        this.allow(0x0c, &[0xff]);
        for (bar, at) in bars.iter().zip((BARS..).step_by(4)) {
            match bar {
                Bar::None => {}
                Bar::Bits32(len) => this.allow(at, &(!(len - 1) & !0xf).to_le_bytes()),
                Bar::Bits64(len) => {
                    this.put(at, &[0xc]);
                    this.allow(at, &(!(len - 1) & !0xf).to_le_bytes());
                }
            }
        }
        this.put(0x2c, &id.0.to_le_bytes());
        this
    }

    /// Adds a capability in front of the others: its number, and its bytes from the third on.
    pub(crate) fn add_capability(&mut self, at: u8, number: u8, bytes: &[u8]) {
        const LIST: usize = 0x34;
        let next = self.bytes[LIST];
        // The status register: a list of capabilities exists.
        self.put(0x06, &[0x10]);
        self.put(LIST, &[at]);
        self.put(at.into(), &[number, next]);
        self.put(usize::from(at) + 2, bytes);
    }

    /// Sets bytes, whether a write can or not.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Makes bits writable.
    pub(crate) fn allow(&mut self, at: usize, bits: &[u8]) {
        self.writable[at..at + bits.len()].copy_from_slice(bits);
    }

    /// The byte at an offset.
    pub(crate) fn byte(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    /// Reads bytes from an offset. The range is within the space.
    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
    }

    /// Writes bytes to an offset: the writable bits of them. The range is within the space.
    pub(crate) fn write(&mut self, at: usize, from: &[u8]) {
        for (i, byte) in (at..).zip(from) {
            self.bytes[i] = self.bytes[i] & !self.writable[i] | byte & self.writable[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ConfigSpace {
        fn word(&self, at: usize) -> u32 {
            let mut bytes = [0; 4];
            self.read(at, &mut bytes);
            u32::from_le_bytes(bytes)
        }
    }

    /// Sizes the BARs as VMMs and kernels do: all ones are written, what is read back is the size, the old value is
    /// written again.
    fn sized(space: &mut ConfigSpace) -> [Bar; 6] {
        let mut bars = [Bar::None; 6];
        let mut i = 0;
        let mut size = |i: usize| {
            let (at, old) = (BARS + 4 * i, space.word(BARS + 4 * i));
            space.write(at, &[0xff; 4]);
            let found = space.word(at);
            space.write(at, &old.to_le_bytes());
            assert_eq!(space.word(at), old);
            found
        };
        while i < 6 {
            let low = size(i);
            assert!(low & 1 == 0, "no BAR of I/O space");
            match low & 0xf {
                0 if low == 0 => {}
                0 => bars[i] = Bar::Bits32(!(low & !0xf) + 1),
                0xc => {
                    let both = u64::from(size(i + 1)) << 32 | u64::from(low & !0xf);
                    bars[i] = Bar::Bits64(!both + 1);
                    i += 1;
                }
                other => panic!("type bits {other:#x}"),
            }
            i += 1;
        }
        bars
    }

    /// All layouts of six registers, with lengths from the smallest to the largest.
    fn layouts() -> Vec<[Bar; 6]> {
        let mut all = Vec::new();
        for kinds in 0..3_usize.pow(6) {
            let mut bars = [Bar::None; 6];
            let mut i = 0;
            while i < 6 {
                let log2 = |span: usize| 4 + (kinds * 7 + i * 11) % span;
                match kinds / 3_usize.pow(i as u32) % 3 {
                    1 => bars[i] = Bar::Bits32(1 << log2(28)),
                    2 if i < 5 => {
                        bars[i] = Bar::Bits64(1 << log2(60));
                        i += 1;
                    }
                    _ => {}
                }
                i += 1;
            }
            all.push(bars);
        }
        all
    }

    #[test]
    fn bars_are_sized_by_writing_ones() {
        for bars in layouts() {
            let mut space = ConfigSpace::new((1, 2), 0x12_0000, bars);
            assert_eq!(sized(&mut space), bars);
            assert_eq!(space.word(0x30), 0);
            space.write(0x30, &[0xff; 4]);
            assert_eq!(space.word(0x30), 0, "no expansion ROM");
            // At an address, each is sized as before, and keeps the address.
            for (i, bar) in bars.iter().enumerate() {
                let at = BARS + 4 * i;
                match bar {
                    Bar::None => continue,
                    Bar::Bits32(len) => space.write(at, &(0x8000_0000_u32 & !(len - 1)).to_le_bytes()),
                    Bar::Bits64(len) => space.write(at, &(0xf765_4321_8000_0000_u64 & !(len - 1)).to_le_bytes()),
                }
            }
            let before = space.bytes;
            assert_eq!(sized(&mut space), bars);
            assert_eq!(space.bytes, before);
        }
    }

    /// A plain model, one bit after the other, with random writes of 1, 2 and 4 bytes at any place.
    #[test]
    fn random_writes_change_what_pci_says() {
        let bars = [Bar::Bits32(0x1_0000), Bar::None, Bar::Bits64(1 << 37), Bar::None, Bar::Bits32(4096), Bar::None];
        let mut space = ConfigSpace::new((0x4c44, 1), 0x12_0000, bars);
        space.add_capability(0x50, 0x13, &[6, 3]);
        space.add_capability(0x40, 0x11, &[1, 0]);
        space.allow(0x42, &0xc000_u16.to_le_bytes());
        let start = space.bytes;
        assert_eq!((start[0x34], start[0x40], start[0x41], start[0x50], start[0x51]), (0x40, 0x11, 0x50, 0x13, 0));
        let writable = |bit: usize| match (bit / 8, bit % 32) {
            (4 | 5, bit) => [1, 2, 6, 8].contains(&bit),
            (0x0c, _) => true,
            (0x10..0x14, bit) => bit >= 16,
            (0x18..0x1c, _) => false,
            (0x1c..0x20, bit) => bit >= 5,
            (0x20..0x24, bit) => bit >= 12,
            (0x42 | 0x43, bit) => bit >= 30,
            _ => false,
        };
        let mut model = start;
        let mut seed = 1_u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as u32
        };
        for _ in 0..100_000 {
            let len = [1, 2, 4][random() as usize % 3];
            // Half of them to the header.
            let at = random() as usize % [0x40, CONFIG_LEN - len + 1][random() as usize % 2];
            let bytes = random().wrapping_mul(3).to_le_bytes();
            space.write(at, &bytes[..len]);
            for bit in 8 * at..8 * (at + len) {
                if writable(bit) {
                    let value = bytes[bit / 8 - at] >> (bit % 8) & 1;
                    model[bit / 8] = model[bit / 8] & !(1 << (bit % 8)) | value << (bit % 8);
                }
            }
            let (at, len) = (random() as usize % (CONFIG_LEN - 3), [1, 2, 4][random() as usize % 3]);
            let mut read = [0; 4];
            space.read(at, &mut read[..len]);
            assert_eq!(read[..len], model[at..at + len], "{len} bytes at {at:#x}");
        }
        assert_eq!(space.bytes, model);
    }
}
