//! A kernel that refuses a userfaultfd. Alone in its process, since it takes away all further file descriptors.

use dmalane_dma::{AnonHeap, Heap, MemfdHeap, PageKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn without_a_userfaultfd_pages_are_written() {
    let page = rustix::param::page_size().max(4096);
    let mut from = AnonHeap::starting_at(PageKind::Base).allocate(4 * page).unwrap();
    from.iter_mut().enumerate().for_each(|(i, b)| *b = (i >> 4) as u8 | 1);
    let (want, from) = (from.to_vec(), from.share());
    let mut reserved = MemfdHeap::starting_at(PageKind::Base).reserve(4 * page).unwrap();
    let (first, second) = (reserved.next(page).unwrap(), reserved.next(3 * page).unwrap());
    let part = |at, len| from.as_volatile_slice().sub(at, len).unwrap();

    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
    let first = first.copy_from(part(0, page));
    let second = second.copy_from(part(page, 3 * page - 7));
    setrlimit(Resource::Nofile, limit).unwrap();

    drop(reserved);
    let whole = first.unwrap().join(second.unwrap()).unwrap().into_whole().unwrap().into_cpu().unwrap();
    assert!(whole[..4 * page - 7] == want[..4 * page - 7]);
    assert_eq!(whole[4 * page - 7..], [0; 7], "the rest of the last page");
}
