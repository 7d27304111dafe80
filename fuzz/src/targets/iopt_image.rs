//! Any bytes as page tables of every format: a walk ends after as many loads as there are levels.

use dmalane_iopt::{Format, formats, walk, walk_privileged};
use arbitrary::Arbitrary;

use crate::structured;

#[derive(Arbitrary, Debug)]
struct Image {
    base: u8,
    root: u16,
    at: [u64; 3],
    /// Entries that lead to a place of the image again: where, and where to.
    links: Vec<(u16, u16, u8)>,
    words: Vec<u64>,
}

impl Image {
    const WORDS: usize = 4096;

    fn memory(&self) -> Vec<u64> {
        let base = self.base();
        let mut memory = vec![0; Self::WORDS];
        memory.iter_mut().zip(self.words.iter().cycle()).for_each(|(word, given)| *word = *given);
        for (at, to, flags) in &self.links {
            let to = base + u64::from(to % 8) * 4096;
            memory[usize::from(*at) % Self::WORDS] = to | u64::from(*flags) | u64::from(flags >> 6) << 62;
        }
        memory
    }

    fn base(&self) -> u64 {
        u64::from(self.base) << 12
    }
}

/// Runs the target on one input.
pub fn target(bytes: &[u8]) {
    let Some(image) = structured::<Image>(bytes) else { return };
    let memory = image.memory();
    macro_rules! each {
        ($($name:ident: $format:ty;)*) => {
            $(run::<$format>(&image, &memory);)*
        };
    }
    formats!(each);
}

fn run<F: Format>(image: &Image, memory: &[u64]) {
    let root = image.base() + u64::from(image.root % 8) * 4096;
    for at in image.at.iter().flat_map(|at| [*at, at & ((1 << F::INPUT_BITS) - 1)]) {
        let mut loads = 0;
        let mut load = |address: u64| {
            loads += 1;
            assert!(address.is_multiple_of(8), "{address:#x}");
            memory.get(usize::try_from(address.checked_sub(image.base())? / 8).ok()?).copied()
        };
        let privileged = walk_privileged::<F>(root, at, &mut load);
        assert!(loads <= F::LEVELS, "{loads} loads for {} levels of {}", F::LEVELS, F::NAME);
        let user = walk::<F>(root, at, |address| {
            memory.get(usize::try_from(address.checked_sub(image.base())? / 8).ok()?).copied()
        });
        if let Ok(walked) = privileged {
            assert!(at >> F::INPUT_BITS == 0, "an address that the format has not");
            let within = walked.size.bytes() - 1;
            assert_eq!(walked.to & within, at & within, "{}: another byte of the page", F::NAME);
        }
        if let Ok(user) = user {
            let privileged = privileged.expect("what a user may do, the privileged may too");
            assert_eq!((user.to, user.size), (privileged.to, privileged.size), "{}", F::NAME);
        }
    }
}
