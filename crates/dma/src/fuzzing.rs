//! The input of a fuzz target, as numbers.

/// Calls a target with `count` inputs of random bytes, each two longer than the one before; the same in every run.
pub fn smoke(count: usize, mut target: impl FnMut(&[u8])) {
    let mut x = 1u64;
    let mut byte = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 40) as u8
    };
    (0..count).for_each(|i| target(&(0..2 * i).map(|_| byte()).collect::<Vec<u8>>()));
}

/// Bytes, read from the front. Past their end everything reads as 0.
pub struct FuzzInput<'a>(&'a [u8]);

impl<'a> FuzzInput<'a> {
    /// Reads these.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// True when everything was read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    /// A number of up to three bytes, mostly small and a multiple of a page.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            0 => u64::MAX - u64::from(self.u8()),
            1 => u64::from(self.u16()),
            2 => u64::from(self.u16()) << 48,
            n => u64::from(n - 3) << 12,
        }
    }

    /// The next `n` bytes, or as many as there are.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}
