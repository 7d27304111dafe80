//! The generator of the original program: mt19937 (Matsumoto and Nishimura, 1998), as C++ defines it.

const N: usize = 624;
const M: usize = 397;

pub struct Mt19937 {
    state: [u32; N],
    at: usize,
}

impl Mt19937 {
    pub fn new(seed: u32) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let before = state[i - 1];
            state[i] = (before ^ before >> 30).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { state, at: N }
    }

    /// The next number, of 32 bits.
    pub fn number(&mut self) -> u32 {
        if self.at == N {
            for i in 0..N {
                let y = self.state[i] & 0x8000_0000 | self.state[(i + 1) % N] & 0x7fff_ffff;
                let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[i] = self.state[(i + M) % N] ^ y >> 1 ^ odd;
            }
            self.at = 0;
        }
        let mut y = self.state[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c_5680;
        y ^= y << 15 & 0xefc6_0000;
        y ^ y >> 18
    }

    /// `gen() % limit`, as the original program takes it.
    pub fn below(&mut self, limit: u64) -> u64 {
        u64::from(self.number()) % limit
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// An error unless the generator gives what the C++ standard says that the 10000th number of the default seed is.
pub fn check() -> Result<(), String> {
    let mut random = Mt19937::new(5489);
    match (0..10_000).map(|_| random.number()).last() {
        Some(4_123_659_995) => Ok(()),
        other => Err(format!("mt19937 gives {other:?}")),
    }
}
