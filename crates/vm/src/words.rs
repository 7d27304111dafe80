//! Memory for the entries of nodes: blocks of one list of words.
//!
//! One list, and not a box for each node, because a bind must reserve the nodes that later unbinds of its parts may
//! need: room at the end of a list is memory that nobody writes to before it is used.

use alloc::vec::Vec;
use core::ops::Range;

use crate::slots::Full;

/// A power of two of units each: the class of a block is the logarithm.
#[derive(Debug)]
pub(crate) struct Words {
    pub(crate) all: Vec<u64>,
    /// Logarithm of the words of a unit.
    unit: u32,
    /// Free blocks of each class.
    free: Vec<Class>,
}

#[derive(Clone, Debug, Default)]
struct Class {
    free: Vec<Block>,
    /// All blocks, free or not.
    blocks: usize,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    at: usize,
    /// True when not all of its words are 0.
    dirty: bool,
}

impl Words {
    /// The words of the root, which are never free, and no others. Blocks are of 2^`unit` words up to 2^`whole`.
    pub(crate) fn new(root: usize, unit: u32, whole: u32) -> Result<Self, Full> {
        let (mut all, mut free) = (Vec::new(), Vec::new());
        all.try_reserve_exact(root)?;
        all.resize(root, 0);
        let classes = (whole - unit) as usize + 1;
        free.try_reserve_exact(classes)?;
        free.resize(classes, Class::default());
        Ok(Self { all, unit, free })
    }

    /// The smallest class whose blocks have this number of units.
    pub(crate) const fn class(units: u32) -> u32 {
        units.next_power_of_two().ilog2()
    }

    /// Logarithm of the words of a class.
    const fn log2(&self, class: u32) -> u32 {
        self.unit + class
    }

    fn whole(&self) -> u32 {
        self.free.len() as u32 - 1
    }

    /// A block, all 0 if `zeroed`, such that there is still memory for `keep` whole ones. Gives where it starts.
    pub(crate) fn take(&mut self, class: u32, keep: u64, zeroed: bool) -> Result<usize, Full> {
        let words = 1 << self.log2(class);
        let Some(&Block { at, dirty }) = self.free[class as usize].free.last() else {
            let at = self.all.len();
            self.reserve(words, keep, 0)?;
            let of_class = &mut self.free[class as usize];
            of_class.free.try_reserve(of_class.blocks + 1)?; // so that giving it back takes no memory
            of_class.blocks += 1;
            self.all.resize(at + words, 0);
            return Ok(at);
        };
        if class == self.whole() {
            self.reserve(0, keep, 1)?;
        }
        self.free[class as usize].free.pop();
        if dirty && zeroed {
            self.all[at..at + words].fill(0);
        }
        Ok(at)
    }

    /// Takes a block back.
    pub(crate) fn give(&mut self, words: Range<usize>, dirty: bool) {
        let class = words.len().ilog2() - self.unit;
        self.free[class as usize].free.push(Block { at: words.start, dirty }); // there is room: `take`
    }

    /// Sees to it that there is memory for `keep` whole blocks.
    pub(crate) fn keep(&mut self, keep: u64) -> Result<(), Full> {
        self.reserve(0, keep, 0)
    }

    /// The same beside a number of words, and with a number of the free blocks in use.
    #[inline]
    fn reserve(&mut self, words: usize, keep: u64, used: usize) -> Result<(), Full> {
        let whole = self.whole();
        let log2 = self.log2(whole);
        let of_class = &mut self.free[whole as usize];
        let Some(fresh) = keep.checked_sub((of_class.free.len() - used) as u64).filter(|&fresh| fresh > 0) else {
            return Ok(self.all.try_reserve(words)?);
        };
        let fresh = usize::try_from(fresh).map_err(|_| Full)?;
        let kept = fresh.checked_mul(1 << log2).and_then(|kept| kept.checked_add(words)).ok_or(Full)?;
        of_class.free.try_reserve(of_class.blocks + fresh - of_class.free.len())?;
        Ok(self.all.try_reserve(kept)?)
    }
}
