//! Page tables without an allocator: `cargo test --no-default-features --test without_alloc` (part no_std of
//! `scripts/check`). With `alloc` the same holds, but for the length of lists.

use std::sync::atomic::AtomicU64;

use dmalane_addr::{Access, Iova, PageSize, PhysAddr, Segment, Span};
use dmalane_iopt::{Error, PageTable, TablePool, X86_64_4Level};

type Table<'p, 'm> = PageTable<X86_64_4Level, Iova, PhysAddr, &'p TablePool<'m, PhysAddr>>;

/// Bytes that a table of the last level translates.
const BLOCK: u64 = 2 << 20;

fn memory(tables: usize) -> Vec<AtomicU64> {
    (0..512 * tables).map(|_| AtomicU64::new(u64::MAX)).collect()
}

/// Pages that no large leaf can map.
fn pages(blocks: u64) -> impl Iterator<Item = Segment<PhysAddr>> + Clone {
    (0..blocks * 512).map(|n| Segment { addr: PhysAddr::new((2 * n + 1) << 12), len: 4096 })
}

fn span(blocks: u64) -> Span<Iova> {
    Span::new(Iova::new(0), blocks * BLOCK).unwrap()
}

#[test]
fn more_tables_are_emptied_than_a_list_has_room_for() {
    let memory = memory(64);
    let mut pool = TablePool::new::<X86_64_4Level>(PhysAddr::new(1 << 20), &memory);
    // Of one owner, which may take away every table, and of several.
    for shared in [false, true] {
        let blocks = 40;
        let (mut left, mut rounds) = (usize::MAX, 0);
        macro_rules! with {
            ($tables:expr) => {{
                let mut table = PageTable::<X86_64_4Level, Iova, PhysAddr, _>::new($tables).unwrap();
                assert_eq!(table.map_sg(Iova::new(0), pages(blocks), Access::RW), Ok(blocks * BLOCK));
                while left > 0 && rounds < 3 {
                    let flush = table.unmap(span(blocks)).unwrap();
                    assert_eq!(flush.bytes(), if rounds == 0 { blocks * BLOCK } else { 0 });
                    table.free_tables(flush);
                    (left, rounds) = (table.linked_tables(), rounds + 1);
                    assert_eq!(table.mapped_bytes(), 0);
                }
                // What stays is used again.
                table.map_sg(Iova::new(0), pages(2), Access::RW).unwrap();
                assert_eq!(table.translate(Iova::new(BLOCK)), Some(PhysAddr::new((2 * 512 + 1) << 12)));
                table.into_tables();
            }};
        }
        if shared {
            with!(&pool)
        } else {
            with!(&mut pool)
        }
        let lists = if cfg!(feature = "alloc") { 1 } else { 2 };
        let expected = if shared { (2, 3) } else { (0, lists) };
        assert_eq!((left, rounds), expected, "shared: {shared}");
        assert_eq!(pool.in_use(), 0);
    }
}

#[test]
fn a_map_that_fails_takes_back_what_it_mapped() {
    let memory = memory(44);
    let pool = TablePool::new::<X86_64_4Level>(PhysAddr::new(1 << 20), &memory);
    let mut table = Table::new(&pool).unwrap();
    let why = table.map_sg(Iova::new(0), pages(50), Access::RW).unwrap_err();
    assert!(matches!(why, Error::NoTables { .. }), "{why}");
    assert_eq!((table.mapped_bytes(), table.runs(span(64)).next()), (0, None));
    // Two of upper levels may be a neighbour's by now, and a list has room for 32 in all.
    let left = if cfg!(feature = "alloc") { 3 } else { 44 - 30 };
    assert_eq!(pool.in_use(), left);
    table.map(Iova::new(64 * BLOCK), PhysAddr::new(0), BLOCK, Access::RW).unwrap();
    assert_eq!(table.lookup(Iova::new(64 * BLOCK)).unwrap().size, PageSize::SIZE_2M);
    assert_eq!(table.registers().next().unwrap().name, "CR3");
    let flush = table.protect(span(65), Access::READ).unwrap();
    assert_eq!((flush.bytes(), flush.span().first().bits()), (BLOCK, 0));
}
