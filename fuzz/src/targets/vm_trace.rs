//! Traces of binds, parsed and replayed, against a model that knows each page by itself.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use dmalane_addr::{Access, Address, CardAddr, DeviceVa, PageSize, Segment, Span};
use dmalane_iopt::{AgxUat, Format, FormatId, X86_64_4Level};
use dmalane_vm::trace::{Line, Lines, Replay, TraceHeader, TraceOperation};
use dmalane_vm::{Mapped, MappedSource};
use arbitrary::{Arbitrary, Unstructured};

/// The first page of the VM and the number of its pages: two leaves of 2 MiB in one format, and some pages on either
/// side.
const FIRST: u64 = 501;
const PAGES: u64 = 1300;
/// A part that is reserved.
const RESERVED: std::ops::Range<u64> = 1700..1710;
const NULL_PAGE: u64 = 1 << 34;

/// An operation of small numbers, so that they meet.
#[derive(Arbitrary, Debug)]
enum Op {
    Bo { id: u8, pieces: Vec<Piece>, more: bool },
    Destroy { id: u8 },
    Bind { at: Number, bo: u8, offset: Number, len: Number, access: u8 },
    Repeat { at: Number, bo: u8, offset: Number, page: u8, len: Number, access: u8 },
    Null { at: Number, len: Number },
    Unbind { at: Number, len: Number },
    UnbindBo { bo: u8 },
    Prefetch { at: Number, len: Number },
    Batch(Vec<Op>),
}

/// A segment: a number of pages at a page.
#[derive(Arbitrary, Debug)]
struct Piece {
    page: u16,
    pages: u8,
    odd: Option<u64>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Number {
    Pages(u16),
    /// Around a boundary of 512 pages.
    Block {
        block: u8,
        more: i8,
    },
    Odd(u64),
}

impl Number {
    fn bytes(self, granule: u64) -> u64 {
        match self {
            Self::Pages(n) => u64::from(n) % (PAGES + FIRST + 8) * granule,
            Self::Block { block, more } => {
                (u64::from(block) % 5 * 512).wrapping_add_signed(i64::from(more)).wrapping_mul(granule)
            }
            Self::Odd(n) => n,
        }
    }
}

/// Mostly what every format can express.
fn access(n: u8) -> Access {
    match n {
        0..100 => Access::RW,
        100..220 => Access::READ,
        220..230 => Access::READ.union(Access::EXEC),
        230..240 => Access::WRITE,
        240..250 => Access::EXEC,
        _ => Access::RW.union(Access::EXEC),
    }
}

impl Op {
    fn operation(&self, granule: u64) -> TraceOperation {
        let va = |at: &Number| DeviceVa::new(at.bytes(granule));
        let id = |n: &u8| u64::from(n % 4);
        match self {
            Self::Bo { id: n, pieces, more } => {
                let segment = |p: &Piece| match p.odd {
                    Some(odd) => Segment { addr: CardAddr::new(odd), len: u64::from(p.pages) * 1000 },
                    None => Segment {
                        addr: CardAddr::new(u64::from(p.page) * granule),
                        len: (u64::from(p.pages) << (p.page % 4)) * granule,
                    },
                };
                TraceOperation::Bo { id: id(n), segments: pieces.iter().take(40).map(segment).collect(), more: *more }
            }
            Self::Destroy { id: n } => TraceOperation::Destroy { id: id(n) },
            Self::Bind { at, bo, offset, len, access: a } => TraceOperation::Bind {
                va: va(at),
                bo: id(bo),
                offset: offset.bytes(granule),
                len: len.bytes(granule),
                access: access(*a),
            },
            Self::Repeat { at, bo, offset, page, len, access: a } => {
                let again = granule << (page % 11);
                // Half of them aligned, or nearly all would be refused.
                let align = |n: u64| if *page >= 128 { n & !(again - 1) } else { n };
                TraceOperation::Repeat {
                    va: DeviceVa::new(align(at.bytes(granule))),
                    bo: id(bo),
                    offset: offset.bytes(granule),
                    page: again,
                    len: align(len.bytes(granule)),
                    access: access(*a),
                }
            }
            Self::Null { at, len } => TraceOperation::Null { va: va(at), len: len.bytes(granule) },
            Self::Unbind { at, len } => TraceOperation::Unbind { va: va(at), len: len.bytes(granule) },
            Self::UnbindBo { bo } => TraceOperation::UnbindBo { bo: id(bo) },
            Self::Prefetch { at, len } => TraceOperation::Prefetch { va: va(at), len: len.bytes(granule) },
            Self::Batch(ops) => TraceOperation::Batch(ops.iter().take(12).map(|op| op.operation(granule)).collect()),
        }
    }
}

/// Runs the target on one input.
pub fn target(data: &[u8]) {
    if data.trim_ascii_start().starts_with(b"{") {
        text(data);
        return;
    }
    let Ok(ops) = Vec::<Op>::arbitrary_take_rest(Unstructured::new(data)) else { return };
    operations::<AgxUat>(&ops);
    operations::<X86_64_4Level>(&ops);
}

/// The input is a trace as it is.
fn text(data: &[u8]) {
    let mut lines = Lines::new(data);
    if let Ok(header) = TraceHeader::read(&mut lines) {
        // A VM in the header is not the model's.
        let _ = (header.vm(FormatId::agx_uat), header.vm(FormatId::x86_64_4level));
    } else {
        lines = Lines::new(data);
    }
    let mut under = Under::<X86_64_4Level>::new();
    for _ in 0..64 {
        let Some(line) = lines.next().expect("memory can be read") else { break };
        under.line(line);
    }
    under.end();
}

fn operations<F: Format>(ops: &[Op]) {
    let mut under = Under::<F>::new();
    // Two buffers to begin with: one piece, and pieces of a few pages.
    let granule = F::GRANULE.bytes();
    let segment = |page: u64, pages: u64| Segment { addr: CardAddr::new(page * granule), len: pages * granule };
    let scattered = (0..80).map(|i| segment(1 << 20 | (i * 37 % 80) << 6, 1 + i % 30)).collect();
    for (id, segments) in [(0, vec![segment(1 << 12, 1 << 12)]), (1, scattered)] {
        let bo = TraceOperation::Bo { id, segments, more: false };
        under.line(Line::Bytes(bo.line().as_bytes()));
    }
    for op in ops.iter().take(48) {
        let operation = op.operation(granule);
        under.line(Line::Bytes(operation.line().as_bytes()));
    }
    under.end();
}

/// A page of the model: where it leads, what for, and by what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Page {
    pa: u64,
    access: Access,
    source: MappedSource,
    /// Which of the buffer objects of that id it is.
    serial: u64,
}

#[derive(Clone)]
struct ModelBo {
    serial: u64,
    segments: Vec<(u64, u64)>,
}

impl ModelBo {
    fn len(&self) -> u64 {
        self.segments.iter().map(|s| s.1).sum()
    }

    /// Where `bytes` at an offset lie, if they are one piece.
    fn at(&self, offset: u64, bytes: u64) -> Option<u64> {
        let mut start = 0;
        let mut found: Option<(u64, u64)> = None; // the address, and bytes that follow in one piece
        for &(pa, len) in &self.segments {
            match found {
                None if offset < start + len => found = Some((pa + (offset - start), start + len - offset)),
                None => {}
                Some((at, left)) if left < bytes => {
                    if at.checked_add(left) != Some(pa) {
                        return None;
                    }
                    found = Some((at, left + len));
                }
                Some(_) => break,
            }
            start += len;
        }
        found.filter(|f| f.1 >= bytes).map(|f| f.0)
    }
}

/// The expected replay.
#[derive(Clone)]
struct Model {
    pages: Vec<Option<Page>>,
    bos: BTreeMap<u64, ModelBo>,
    unfinished: BTreeMap<u64, ModelBo>,
    serial: u64,
}

struct Under<F> {
    replay: Replay,
    model: Model,
    steps: u32,
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Under<F> {
    const GRANULE: u64 = F::GRANULE.bytes();

    fn new() -> Self {
        let span = |first: u64, pages: u64| Span::new(DeviceVa::new(first * Self::GRANULE), pages * Self::GRANULE);
        let header = TraceHeader {
            format: None,
            range: span(FIRST, PAGES),
            reserved: span(RESERVED.start, RESERVED.end - RESERVED.start),
            null_page: Some(Segment { addr: CardAddr::new(NULL_PAGE), len: 2 * Self::GRANULE }),
            break_before_make: false,
        };
        let pages = vec![None; PAGES as usize];
        let model = Model { pages, bos: BTreeMap::new(), unfinished: BTreeMap::new(), serial: 0 };
        let vm = header.vm(F::NAME.parse().unwrap()).unwrap();
        Self { replay: Replay::new(vm), model, steps: 0, format: std::marker::PhantomData }
    }

    fn line(&mut self, line: Line<'_>) {
        let parsed = TraceOperation::parse(line);
        let Some(outcome) = self.replay.step(line) else { return };
        match &parsed {
            Err((_, refusal)) => {
                assert_eq!(outcome.result.as_ref().unwrap_err(), refusal);
                assert!(!refusal.name().is_empty() && refusal.errno().number() > 0);
            }
            // A limit of the replay that the model does not count.
            Ok(TraceOperation::Bo { .. }) if outcome.name() == "too_scattered" => {}
            Ok(operation) => {
                assert_eq!(TraceOperation::parse(Line::Bytes(operation.line().as_bytes())).as_ref(), Ok(operation));
                let mut after = self.model.clone();
                let right = match operation {
                    TraceOperation::Batch(batch) => batch.iter().all(|o| self.request(&mut after, o)),
                    single => self.request(&mut after, single),
                };
                assert_eq!(outcome.result.is_ok(), right, "{operation:?}: {outcome:?}");
                assert_eq!(outcome.op, Some(operation.name()));
                if right {
                    self.model = after;
                }
            }
        }
        // All pages are a lot to look at; what is wrong and not covered up will be seen soon.
        self.steps += 1;
        if self.steps <= 12 || self.steps.is_multiple_of(4) {
            self.agree();
        }
    }

    /// The pages of a span, counted from the VM's first, if a user may change it.
    fn span(&self, va: DeviceVa, len: u64) -> Option<std::ops::Range<usize>> {
        let granule = Self::GRANULE;
        let end = va.bits().checked_add(len)?;
        if len == 0 || !(va.bits() | len).is_multiple_of(granule) {
            return None;
        }
        let (first, end) = (va.bits() / granule, end / granule);
        let within = first >= FIRST && end <= FIRST + PAGES && !(first < RESERVED.end && end > RESERVED.start);
        within.then(|| (first - FIRST) as usize..(end - FIRST) as usize)
    }

    /// Applies an operation to the model; false when it must be refused.
    fn request(&self, model: &mut Model, operation: &TraceOperation) -> bool {
        self.try_request(model, operation).is_some()
    }

    fn try_request(&self, model: &mut Model, operation: &TraceOperation) -> Option<()> {
        let granule = Self::GRANULE;
        match operation {
            TraceOperation::Bo { id, segments, more } => {
                if model.bos.contains_key(id) {
                    return None;
                }
                let mut bo = model.unfinished.get(id).cloned().unwrap_or_else(|| {
                    model.serial += 1;
                    ModelBo { serial: model.serial, segments: Vec::new() }
                });
                let mut total = bo.len();
                for s in segments {
                    let (pa, len) = (s.addr.bits(), s.len);
                    pa.checked_add(len.checked_sub(1)?)?;
                    total = total.checked_add(len)?;
                    bo.segments.push((pa, len));
                }
                model.unfinished.remove(id);
                let list = if *more { &mut model.unfinished } else { &mut model.bos };
                list.insert(*id, bo);
            }
            TraceOperation::Destroy { id } => {
                model.unfinished.remove(id).or_else(|| model.bos.remove(id))?;
            }
            TraceOperation::Bind { va, bo: id, offset, len, access } => {
                let bo = model.bos.get(id)?;
                let pages = self.bind(bo, *va, *offset, *len, *len, *access)?;
                for (i, page) in pages.enumerate() {
                    let offset = offset + i as u64 * granule;
                    let (pa, source) = (self.page(bo, offset)?, MappedSource::Bo { bo: *id, offset });
                    model.pages[page] = Some(Page { pa, access: *access, source, serial: bo.serial });
                }
            }
            TraceOperation::Repeat { va, bo: id, offset, page: again, len, access } => {
                let bo = model.bos.get(id)?;
                if !again.is_power_of_two() || *again < granule || (va.bits() | len) % again != 0 {
                    return None;
                }
                let pages = self.bind(bo, *va, *offset, *again, *len, *access)?;
                let source = MappedSource::Repeat { bo: *id, offset: *offset, page: *again };
                for at in (*offset..offset + again).step_by(granule as usize) {
                    self.page(bo, at)?;
                }
                for page in pages {
                    let pa = self.page(bo, offset + (FIRST + page as u64) * granule % again)?;
                    model.pages[page] = Some(Page { pa, access: *access, source, serial: bo.serial });
                }
            }
            TraceOperation::Null { va, len } => {
                for page in self.span(*va, *len)? {
                    let pa = NULL_PAGE + (FIRST + page as u64) % 2 * granule;
                    model.pages[page] = Some(Page { pa, access: Access::READ, source: MappedSource::Null, serial: 0 });
                }
            }
            TraceOperation::Unbind { va, len } => model.pages[self.span(*va, *len)?].fill(None),
            TraceOperation::UnbindBo { bo } => {
                let serial = model.bos.get(bo)?.serial;
                model.pages.iter_mut().filter(|p| p.is_some_and(|p| p.serial == serial)).for_each(|p| *p = None);
            }
            TraceOperation::Prefetch { va, len } => {
                self.span(*va, *len)?;
            }
            other => panic!("{other:?} cannot stand in a batch"),
        }
        Some(())
    }

    /// The checks of both kinds of bind but that of each page.
    fn bind(
        &self,
        bo: &ModelBo,
        va: DeviceVa,
        offset: u64,
        used: u64,
        len: u64,
        access: Access,
    ) -> Option<std::ops::Range<usize>> {
        let pages = self.span(va, len)?;
        let right = offset.is_multiple_of(Self::GRANULE)
            && offset.checked_add(used)? <= bo.len()
            && bo.len() / Self::GRANULE <= (1 << 32) - 2
            && F::supports(access);
        right.then_some(pages)
    }

    /// Where a page of a buffer object is, if it can be mapped.
    fn page(&self, bo: &ModelBo, offset: u64) -> Option<u64> {
        let pa = bo.at(offset, Self::GRANULE)?;
        (pa % Self::GRANULE == 0 && (pa + (Self::GRANULE - 1)) >> F::OUTPUT_BITS == 0).then_some(pa)
    }

    /// The VM is what the model says, page by page, in its page table and in its bindings.
    fn agree(&self) {
        let vm = self.replay.vm();
        let mut sources = vec![None; PAGES as usize];
        let mut last: Option<Mapped> = None;
        vm.mapping(vm.range(), &mut |run| {
            assert!(last.is_none_or(|l| l.span.last() < run.span.first()), "runs overlap");
            last = Some(run);
            let first = (run.span.first().bits() / Self::GRANULE - FIRST) as usize;
            for i in 0..(run.span.len() / Self::GRANULE) as usize {
                sources[first + i] = Some(match run.source {
                    MappedSource::Bo { bo, offset } => {
                        MappedSource::Bo { bo, offset: offset + i as u64 * Self::GRANULE }
                    }
                    other => other,
                });
            }
            ControlFlow::Continue(())
        });
        for (i, page) in self.model.pages.iter().enumerate() {
            let va = DeviceVa::new((FIRST + i as u64) * Self::GRANULE);
            let leaf = vm.lookup(va);
            assert!(leaf.is_none_or(|l| F::PAGE_SIZES.contains(l.size) && l.at.is_aligned(l.size)));
            let mapped = leaf.map(|l| (l.translate(va).unwrap().bits(), l.access));
            assert_eq!(mapped, page.map(|p| (p.pa, p.access)), "{va}");
            assert_eq!(sources[i], page.map(|p| p.source), "{va}");
        }
        assert_eq!(vm.lookup(DeviceVa::new((FIRST - 1) * Self::GRANULE)), None);
    }

    fn end(mut self) {
        self.agree();
        let size = PageSize::new(Self::GRANULE).unwrap();
        for part in [FIRST..RESERVED.start, RESERVED.end..FIRST + PAGES] {
            let (first, pages) = (part.start << size.log2(), part.end - part.start);
            let unbind = TraceOperation::Unbind { va: DeviceVa::new(first), len: pages << size.log2() };
            self.replay.apply(&unbind).result.unwrap();
        }
        assert_eq!(self.replay.vm().binding_count(), 0);
        self.model.pages.fill(None);
        self.agree();
    }
}
