//! The card's own memory: DDR and HBM, sparse.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmalane_addr::{Address, CardAddr, Span};
use dmalane_dma::{SharedBuf, VolatileSlice};

use crate::Error;
use crate::present::Present;

/// Memory is made present in blocks of this many bytes.
pub(crate) const BLOCK: u64 = 2 << 20;
/// Where HBM starts: 256 GiB, as on the Alveo V80. DDR starts at 0.
pub(crate) const HBM_BASE: u64 = 1 << 38;

/// Who is asked before card memory is made present.
pub trait Allowance: Send + Sync {
    /// Takes this many bytes; false when they cannot be had.
    fn take(&self, bytes: u64) -> bool;
    /// Gives back bytes that were taken and then not needed.
    fn give(&self, bytes: u64);
}

/// DDR and HBM of a card. Memory that was never touched costs nothing and reads as zeros.
pub struct CardMemory {
    ddr: Bank,
    hbm: Bank,
    /// Both, each at its card address, where they can be lent.
    file: Option<OwnedFd>,
    /// Others may have it mapped, and write where nothing is present yet.
    lent: AtomicBool,
}

impl CardMemory {
    /// `ddr` bytes at card address 0 and `hbm` bytes at card address 2^38: of this process, in huge pages where the
    /// kernel has them.
    ///
    /// # Errors
    /// [`Error::BadConfig`] unless `ddr` is a multiple of 2 MiB, `hbm` one of 4 MiB (so that its halves are whole
    /// blocks), and each at least that and at most 256 GiB; [`Error::Memory`] when the machine refuses the address
    /// space.
    pub fn new(ddr: u64, hbm: u64) -> Result<Self, Error> {
        let spans = Self::spans(ddr, hbm, HBM_BASE)?;
        let private = |span: &Span<CardAddr>| SharedBuf::sparse_private(span.len() as usize);
        match [private(&spans[0]), private(&spans[1])] {
            [Ok(ddr), Ok(hbm)] => Ok(Self::of(spans, [ddr, hbm], None)),
            // Of private memory that is not there yet a machine without overcommitment has no more than it has memory.
            _ => Self::shared(spans),
        }
    }

    /// The same with HBM as near as its own length and that of DDR let it begin at a power of two: a BAR that shows the
    /// memory is then no longer than it must be (a machine has few addresses for BARs). Other processes can map it.
    ///
    /// # Errors
    /// As [`CardMemory::new`].
    pub fn compact(ddr: u64, hbm: u64) -> Result<Self, Error> {
        Self::shared(Self::spans(ddr, hbm, ddr.max(hbm).min(HBM_BASE).next_power_of_two())?)
    }

    fn spans(ddr: u64, hbm: u64, hbm_base: u64) -> Result<[Span<CardAddr>; 2], Error> {
        Ok([
            bank(("DDR", "must be a multiple of 2 MiB, neither zero nor above 256 GiB"), 0, ddr, BLOCK)?,
            bank(("HBM", "must be a multiple of 4 MiB, neither zero nor above 256 GiB"), hbm_base, hbm, 2 * BLOCK)?,
        ])
    }

    fn of(spans: [Span<CardAddr>; 2], [ddr, hbm]: [SharedBuf; 2], file: Option<OwnedFd>) -> Self {
        let [ddr, hbm] = [Bank::new(spans[0], ddr), Bank::new(spans[1], hbm)];
        Self { ddr, hbm, file, lent: AtomicBool::new(false) }
    }

    fn shared(spans: [Span<CardAddr>; 2]) -> Result<Self, Error> {
        let ranges = spans.map(|span| span.first().bits()..span.first().bits() + span.len());
        let (buffers, file) = SharedBuf::sparse_ranges("dmalane-card", &ranges)?;
        let Ok(buffers) = <[SharedBuf; 2]>::try_from(buffers) else { unreachable!("a buffer for each range") };
        Ok(Self::of(spans, buffers, Some(file)))
    }

    /// The same, where `allowance` is asked before memory is made present.
    #[must_use]
    pub fn with_allowance(mut self, allowance: Arc<dyn Allowance>) -> Self {
        self.ddr.allowance = Some(allowance.clone());
        self.hbm.allowance = Some(allowance);
        self
    }

    /// The memfd that is the memory, byte for byte at its card address, for another process to map; and which bytes of
    /// it are memory. The others are nobody's: what is written there the card does not see. `None` for memory of this
    /// process.
    pub fn lend(&self) -> Option<(BorrowedFd<'_>, [Range<u64>; 2])> {
        let file = self.file.as_ref()?;
        self.lent.store(true, Ordering::Relaxed);
        let range = |span: Span<CardAddr>| span.first().bits()..span.first().bits() + span.len();
        Some((file.as_fd(), [range(self.ddr.span), range(self.hbm.span)]))
    }

    /// The addresses of DDR.
    pub fn ddr(&self) -> Span<CardAddr> {
        self.ddr.span
    }

    /// The addresses of HBM. Its second half starts in the middle.
    pub fn hbm(&self) -> Span<CardAddr> {
        self.hbm.span
    }

    /// Bytes of DDR and of HBM that are present, in blocks of 2 MiB.
    pub fn touched(&self) -> (u64, u64) {
        (self.ddr.present.count() * BLOCK, self.hbm.present.count() * BLOCK)
    }

    /// True when all of a range is present, so that no access to it needs new memory.
    pub fn is_present(&self, at: CardAddr, len: u64) -> bool {
        let Some(bank) = self.bank(at).filter(|_| self.holds(at, len)) else { return false };
        let offset = at.bits() - bank.span.first().bits();
        (offset / BLOCK..=(offset + len.max(1) - 1) / BLOCK).all(|block| bank.is_present(block))
    }

    /// Makes a range present, so that a later first touch costs nothing.
    ///
    /// # Errors
    /// [`Error::Outside`] unless the range lies in one of the memories, [`Error::NoMemory`].
    pub fn populate(&self, span: Span<CardAddr>) -> Result<(), Error> {
        self.view(span.first(), span.len()).map(drop)
    }

    /// Copies out what the card has at `at`, behind the back of every channel.
    ///
    /// # Errors
    /// As [`CardMemory::populate`].
    pub fn read(&self, at: CardAddr, into: &mut [u8]) -> Result<(), Error> {
        self.view(at, into.len() as u64)?.read(into);
        Ok(())
    }

    /// Copies bytes in, behind the back of every channel. Whole aligned 64-bit words are written one by one, each
    /// atomically: a page-table entry is never seen half written.
    ///
    /// # Errors
    /// As [`CardMemory::populate`].
    pub fn write(&self, at: CardAddr, bytes: &[u8]) -> Result<(), Error> {
        let view = self.view(at, bytes.len() as u64)?;
        match bytes.as_chunks::<8>() {
            (words, []) if at.bits().is_multiple_of(8) => {
                for (i, word) in words.iter().enumerate() {
                    view.store_u64(8 * i, u64::from_le_bytes(*word)).expect("an aligned word within the view");
                }
            }
            _ => view.write(bytes),
        }
        Ok(())
    }

    /// The bytes of a range, present.
    ///
    /// # Errors
    /// As [`CardMemory::populate`].
    #[inline]
    pub(crate) fn view(&self, at: CardAddr, len: u64) -> Result<VolatileSlice<'_>, Error> {
        self.view_counting(at, len, &mut 0)
    }

    /// [`CardMemory::view`]. Adds the bytes that it makes present to `made`.
    #[inline]
    pub(crate) fn view_counting(&self, at: CardAddr, len: u64, made: &mut u64) -> Result<VolatileSlice<'_>, Error> {
        let bank = self.bank(at).ok_or(Error::Outside { at, len })?;
        bank.view(at, len, made)
    }

    /// True when the whole range lies in one of the memories.
    #[inline]
    pub(crate) fn holds(&self, at: CardAddr, len: u64) -> bool {
        let span = Span::new(at, len);
        span.is_some_and(|span| self.bank(at).is_some_and(|bank| bank.span.covers(&span)))
    }

    /// The 64-bit word at `at`: a page-table entry. A block that is not present reads as zeros and stays absent, unless
    /// somebody else may have written it. `None` outside the memories, for an address that is not a multiple of 8, and
    /// where the block cannot be made present.
    pub(crate) fn load(&self, at: CardAddr) -> Option<u64> {
        let bank = self.bank(at)?;
        let offset = at.offset_from(bank.span.first())?;
        if !bank.is_present(offset / BLOCK) {
            if !self.lent.load(Ordering::Relaxed) {
                return offset.is_multiple_of(8).then_some(0);
            }
            bank.make_present(offset / BLOCK, &mut 0).ok()?;
        }
        bank.buf.as_volatile_slice().load_u64(usize::try_from(offset).ok()?)
    }

    /// Stores the 64-bit word at `at`, if that is a multiple of 8 in a block that is present: [`CardMemory::write`] of
    /// one entry.
    #[inline]
    pub(crate) fn store(&self, at: CardAddr, value: u64) -> bool {
        let offset = |bank: &Bank| at.offset_from(bank.span.first()).filter(|offset| bank.is_present(offset / BLOCK));
        let store = |bank: &Bank| bank.buf.as_volatile_slice().store_u64(usize::try_from(offset(bank)?).ok()?, value);
        self.bank(at).and_then(store).is_some()
    }

    #[inline]
    fn bank(&self, at: CardAddr) -> Option<&Bank> {
        let bank = if at < self.hbm.span.first() { &self.ddr } else { &self.hbm };
        bank.span.contains(at).then_some(bank)
    }
}

dmalane_dma::debug_as!(CardMemory, |it| "CardMemory {{ ddr: {:?}, hbm: {:?}, .. }}", it.ddr.span, it.hbm.span);

/// Card memory for many accesses in a row: the block of 2 MiB that was used last is at hand.
pub(crate) struct Block<'m> {
    memory: &'m CardMemory,
    first: u64,
    /// Present, and so it stays.
    bytes: Option<VolatileSlice<'m>>,
    /// Bytes of card memory that were made present for accesses through this.
    pub(crate) made: u64,
}

impl<'m> Block<'m> {
    pub(crate) fn of(memory: &'m CardMemory) -> Self {
        Self { memory, first: 0, bytes: None, made: 0 }
    }

    /// [`CardMemory::view`]; `None` where that fails.
    #[inline]
    pub(crate) fn view(&mut self, at: CardAddr, len: u64) -> Option<VolatileSlice<'m>> {
        self.within(at, len).or_else(|| self.change(at, len))
    }

    /// The bytes of a range that lies within the block.
    #[inline]
    fn within(&self, at: CardAddr, len: u64) -> Option<VolatileSlice<'m>> {
        // Of an address before the block the offset wraps, and lies in none.
        let offset = usize::try_from(at.bits().wrapping_sub(self.first)).ok()?;
        self.bytes?.sub(offset, usize::try_from(len).ok()?)
    }

    fn change(&mut self, at: CardAddr, len: u64) -> Option<VolatileSlice<'m>> {
        let bank = self.memory.bank(at)?;
        let offset = at.offset_from(bank.span.first())? & !(BLOCK - 1);
        let block = bank.buf.as_volatile_slice().sub(usize::try_from(offset).ok()?, BLOCK as usize)?;
        if !bank.is_present(offset / BLOCK) {
            bank.make_present(offset / BLOCK, &mut self.made).ok()?;
        }
        (self.first, self.bytes) = (bank.span.first().bits() + offset, Some(block));
        // A range that goes on behind the block is resolved by the memory.
        self.within(at, len).or_else(|| self.memory.view_counting(at, len, &mut self.made).ok())
    }
}

struct Bank {
    span: Span<CardAddr>,
    buf: SharedBuf,
    present: Present,
    allowance: Option<Arc<dyn Allowance>>,
}

/// The addresses of a bank.
fn bank(
    (setting, rule): (&'static str, &'static str),
    base: u64,
    len: u64,
    multiple: u64,
) -> Result<Span<CardAddr>, Error> {
    let fits = len.is_multiple_of(multiple) && len <= HBM_BASE && usize::try_from(len).is_ok();
    let span = Span::new(CardAddr::new(base), len).filter(|_| fits);
    span.ok_or(Error::BadConfig { setting, value: len, rule })
}

impl Bank {
    fn new(span: Span<CardAddr>, buf: SharedBuf) -> Self {
        Self { span, buf, present: Present::new(span.len() / BLOCK), allowance: None }
    }

    #[inline]
    fn view(&self, at: CardAddr, len: u64, made: &mut u64) -> Result<VolatileSlice<'_>, Error> {
        let cut =
            |offset: u64| self.buf.as_volatile_slice().sub(usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        let Some((offset, view)) = at.offset_from(self.span.first()).and_then(|offset| Some((offset, cut(offset)?)))
        else {
            return Err(Error::Outside { at, len });
        };
        if len > 0 {
            let (first, last) = (offset / BLOCK, (offset + len - 1) / BLOCK);
            if first != last || !self.is_present(first) {
                for block in first..=last {
                    self.make_present(block, made)?;
                }
            }
        }
        Ok(view)
    }

    #[inline]
    fn is_present(&self, block: u64) -> bool {
        self.present.contains(block)
    }

    /// Asks the kernel for the pages now, where a refusal is an error, instead of touching them, where it is a SIGBUS.
    /// Adds the bytes to `made`.
    fn make_present(&self, block: u64, made: &mut u64) -> Result<(), Error> {
        if self.is_present(block) {
            return Ok(());
        }
        let no_memory = |source| Error::NoMemory { at: self.span.first() + block * BLOCK, source };
        let taken = Taken::new(self.allowance.as_deref())
            .ok_or_else(|| no_memory(std::io::Error::new(std::io::ErrorKind::QuotaExceeded, "the limit of memory")))?;
        // Two channels may come here at once; the second call finds the pages and changes nothing.
        self.buf.populate((block * BLOCK) as usize, BLOCK as usize).map_err(no_memory)?;
        if self.present.insert(block) {
            *made += BLOCK;
            std::mem::forget(taken);
        }
        Ok(())
    }
}

/// A block that was taken of an allowance; given back on drop.
struct Taken<'a>(Option<&'a dyn Allowance>);

impl<'a> Taken<'a> {
    /// `None` where it cannot be had.
    fn new(allowance: Option<&'a dyn Allowance>) -> Option<Self> {
        allowance.is_none_or(|allowance| allowance.take(BLOCK)).then(|| Self(allowance))
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(allowance) = self.0 {
            allowance.give(BLOCK);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Counts what is taken, up to half of all numbers.
    #[derive(Default)]
    struct Counted(AtomicU64);

    impl Allowance for Counted {
        fn take(&self, bytes: u64) -> bool {
            self.0
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n + bytes).filter(|n| n >> 63 == 0))
                .is_ok()
        }

        fn give(&self, bytes: u64) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn memory_that_two_channels_touch_at_once_counts_once() {
        const BLOCKS: u64 = 64;
        let taken = Arc::new(Counted::default());
        let memory = CardMemory::new(BLOCKS * BLOCK, 2 * BLOCK).unwrap().with_allowance(taken.clone());
        let barrier = Barrier::new(2);
        let touch = || {
            let mut made = 0;
            for block in 0..BLOCKS {
                barrier.wait();
                memory.ddr.view(CardAddr::new(block * BLOCK), 8, &mut made).unwrap();
            }
            made
        };
        let made = std::thread::scope(|scope| {
            let other = scope.spawn(touch);
            touch() + other.join().unwrap()
        });
        assert_eq!((made, taken.0.load(Ordering::Relaxed)), (BLOCKS * BLOCK, BLOCKS * BLOCK));
    }

    #[test]
    fn what_is_refused_is_not_given_back() {
        let taken = Arc::new(Counted::default());
        let memory = CardMemory::new(2 * BLOCK, 2 * BLOCK).unwrap().with_allowance(taken.clone());
        let most = (1 << 63) - BLOCK - 1;
        taken.0.store(most, Ordering::Relaxed);
        memory.write(CardAddr::new(0), &[1]).unwrap();
        assert!(matches!(memory.write(CardAddr::new(BLOCK), &[1]), Err(Error::NoMemory { .. })));
        assert_eq!((taken.0.load(Ordering::Relaxed), memory.touched()), (most + BLOCK, (BLOCK, 0)));
        let hbm = memory.write(CardAddr::new(HBM_BASE), &[1]);
        assert!(matches!(hbm, Err(Error::NoMemory { .. })), "HBM counts too");
    }

    #[test]
    fn no_page_is_made_for_what_is_refused() {
        let taken = Arc::new(Counted(AtomicU64::new((1 << 63) - 1)));
        let memory = CardMemory::compact(2 * BLOCK, 2 * BLOCK).unwrap().with_allowance(taken);
        let (file, _) = memory.lend().unwrap();
        assert!(matches!(memory.write(CardAddr::new(0), &[1]), Err(Error::NoMemory { .. })));
        assert_eq!((rustix::fs::fstat(file).unwrap().st_blocks, memory.touched()), (0, (0, 0)));
    }

    #[test]
    fn all_blocks_of_a_range_are_made_present() {
        let taken = Arc::new(Counted::default());
        let memory = CardMemory::new(4 * BLOCK, 2 * BLOCK).unwrap().with_allowance(taken.clone());
        // The first one is there, and the third.
        for block in [0, 2] {
            memory.write(CardAddr::new(block * BLOCK), &[1]).unwrap();
        }
        memory.read(CardAddr::new(8), &mut vec![0; 3 * BLOCK as usize]).unwrap();
        assert_eq!((taken.0.load(Ordering::Relaxed), memory.touched()), (4 * BLOCK, (4 * BLOCK, 0)));
    }

    #[test]
    fn reads_zeros_and_costs_what_is_touched() {
        let memory = CardMemory::new(64 << 30, 32 << 30).unwrap();
        assert_eq!(memory.load(CardAddr::new(8)), Some(0));
        assert_eq!(memory.touched(), (0, 0), "looking at an entry makes nothing present");
        let at = CardAddr::new((40 << 30) + BLOCK - 4);
        memory.write(at, b"straddle").unwrap();
        let mut got = [1; 10];
        memory.read(at, &mut got).unwrap();
        assert_eq!(&got, b"straddle\0\0");
        assert_eq!(memory.touched(), (2 * BLOCK, 0));
        assert!(memory.is_present(at, 10) && !memory.is_present(at, BLOCK + 10) && !memory.is_present(at, u64::MAX));
        assert!(!memory.is_present(CardAddr::new(HBM_BASE - 1), 1), "there is no memory");
        memory.write(CardAddr::new(HBM_BASE), &7u64.to_le_bytes()).unwrap();
        assert_eq!(memory.load(CardAddr::new(HBM_BASE)), Some(7));
        assert_eq!(memory.load(CardAddr::new(HBM_BASE + 4)), None, "not a multiple of 8");
        assert!(memory.store(CardAddr::new(HBM_BASE + 8), 9) && !memory.store(CardAddr::new(HBM_BASE + 4), 1));
        assert!(!memory.store(CardAddr::new(HBM_BASE + BLOCK), 1) && !memory.store(CardAddr::new(HBM_BASE - 8), 1));
        assert_eq!([0, 8].map(|at| memory.load(CardAddr::new(HBM_BASE + at))), [Some(7), Some(9)]);
        assert_eq!(memory.touched(), (2 * BLOCK, BLOCK));
    }

    #[test]
    fn what_another_process_writes_is_memory() {
        let memory = CardMemory::compact(6 * BLOCK, 2 * BLOCK).unwrap();
        let base = 8 * BLOCK;
        assert_eq!(memory.hbm().first(), CardAddr::new(base), "behind DDR, at a power of two");
        let (file, [ddr, hbm]) = memory.lend().unwrap();
        assert_eq!((ddr, hbm), (0..6 * BLOCK, base..base + 2 * BLOCK));
        // Nothing is present there; the card's MMU sees it all the same, and so does a copy.
        for (at, value) in [(BLOCK + 8, 7u64), (base + BLOCK, 9)] {
            rustix::io::pwrite(file, &value.to_le_bytes(), at).unwrap();
            assert_eq!(memory.load(CardAddr::new(at)), Some(value));
            let mut bytes = [0; 8];
            memory.read(CardAddr::new(at), &mut bytes).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), value);
        }
        memory.write(CardAddr::new(base), &5u64.to_le_bytes()).unwrap();
        let mut bytes = [0; 8];
        rustix::io::pread(file, &mut bytes, base).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), 5);
        assert_eq!(memory.load(CardAddr::new(6 * BLOCK)), None, "between the two is nothing");
        let far = CardMemory::compact(BLOCK, 3 * BLOCK);
        assert!(matches!(far, Err(Error::BadConfig { .. })), "HBM is a multiple of two blocks");
        assert_eq!(CardMemory::compact(BLOCK, 4 * BLOCK).unwrap().hbm().first().bits(), 4 * BLOCK);
        assert_eq!(CardMemory::compact(HBM_BASE, HBM_BASE).unwrap().hbm().first().bits(), HBM_BASE);
        assert!(CardMemory::compact(u64::MAX, 4 * BLOCK).is_err());
    }

    #[test]
    fn a_block_at_hand_gives_what_the_memory_does() {
        let memory = CardMemory::new(4 * BLOCK, 4 * BLOCK).unwrap();
        let mut block = Block::of(&memory);
        let (last, hbm) = (4 * BLOCK - 8, HBM_BASE);
        // Forwards, backwards, across blocks, past the ends, and of no bytes.
        let places = [0, 8, BLOCK - 8, BLOCK, 3 * BLOCK, 0, last, hbm, hbm + 4 * BLOCK - 8, last, hbm - 8, u64::MAX, 8];
        for at in places {
            for len in [0, 8, 9, 2 * BLOCK, u64::MAX] {
                let whole = memory.view(CardAddr::new(at), len);
                let at_hand = block.view(CardAddr::new(at), len);
                let place = |view: VolatileSlice<'_>| (view.as_ptr(), view.len());
                assert_eq!(at_hand.map(place), whole.ok().map(place), "{at:#x} + {len:#x}");
            }
        }
        let (untouched, first) = (CardMemory::new(4 * BLOCK, 4 * BLOCK).unwrap(), CardAddr::new(BLOCK));
        assert!(Block::of(&untouched).view(first, 8).is_some());
        assert_eq!(untouched.touched(), (BLOCK, 0));
    }

    #[test]
    fn ends_where_it_ends() {
        let memory = CardMemory::new(BLOCK, 2 * BLOCK).unwrap();
        for (at, len) in
            [(0, BLOCK + 1), (BLOCK, 1), (HBM_BASE - 1, 1), (HBM_BASE, 2 * BLOCK + 1), (u64::MAX, 1), (1, u64::MAX)]
        {
            assert!(matches!(memory.view(CardAddr::new(at), len), Err(Error::Outside { .. })), "{at:#x} + {len:#x}");
            assert!(!memory.holds(CardAddr::new(at), len));
        }
        assert_eq!(memory.load(CardAddr::new(BLOCK)), None);
        assert!(memory.holds(CardAddr::new(HBM_BASE), 2 * BLOCK));
        assert_eq!(memory.touched(), (0, 0));
        for (ddr, hbm) in [(0, 4), (3, 4), (2, 2), (2, 0), (512 << 10, 4)] {
            let made = CardMemory::new(ddr << 20, hbm << 20);
            assert!(matches!(made, Err(Error::BadConfig { .. })), "{ddr} {hbm}");
        }
    }
}
