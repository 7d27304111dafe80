//! Attacks by files that are mapped for the card, and by their mappings.

use super::*;

/// One memfd in 960 000 mappings, 60 000 in each of 16 processes, which touch it while its second page is punched, and
/// the daemon maps and unmaps it. More processes where they may have fewer descriptors, since each mapping has one.
pub(super) fn mappings(path: &Path) -> ! {
    if is_child() {
        let memfd = std::io::stdin();
        let import = |_| SharedBuf::import(memfd.as_fd().try_clone_to_owned().ok()?).ok();
        let all: Vec<SharedBuf> = (0..60_000).map_while(import).collect();
        let touch = || all.iter().for_each(|buf| buf.as_volatile_slice().store_u32(4096, 1).unwrap());
        touch();
        println!("mapped {}", all.len());
        // The processor is for who punches, which takes longest where pages are present.
        rustix::process::nice(19).unwrap();
        loop {
            std::thread::sleep(Duration::from_secs(1));
            touch();
        }
    }
    let memfd = sparse(8192);
    rustix::io::pwrite(&memfd, &[1], 0).unwrap();
    let (mut processes, mut mapped) = (Vec::new(), 0);
    while mapped < 20_000 * connections() && processes.len() < connections() {
        let mut process = child(memfd.try_clone().unwrap(), 1);
        let line = process.wait_for("mapped");
        mapped += line.trim().rsplit(' ').next().unwrap().parse::<usize>().unwrap();
        processes.push(process);
    }
    println!("{mapped} mappings in {} processes", processes.len());
    let punched = memfd.try_clone().unwrap();
    std::thread::spawn(move || {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            rustix::fs::fallocate(&punched, flags, 4096, 4096).unwrap();
        }
    });
    with_all(4, || opened(path).unwrap(), |socket| map_and_unmap(path, socket, &memfd))
}

/// Maps the first page of a memfd and unmaps it.
fn map_and_unmap(path: &Path, socket: &mut OwnedFd, memfd: &OwnedFd) {
    if let Ok(iova) = map(socket, memfd, 4096) {
        let _ = ask(socket, &ClientRequest::Unmap { iova }, &[]);
    } else if ask(socket, &ClientRequest::Status { first: 0 }, &[]).is_err() {
        opened(path).into_iter().for_each(|new| *socket = new);
    }
}

/// Maps the first bytes of a memfd: the address.
fn map(socket: &OwnedFd, memfd: &OwnedFd, len: usize) -> Result<u64, String> {
    send_map_of(socket, memfd, len);
    let body = receive_body(socket)?;
    Ok(u64::from_le_bytes(*body.first_chunk().ok_or("too short")?))
}

/// Maps and unmaps the first page of a file, the rest of which is allocated and freed meanwhile, a gigabyte at a time.
pub(super) fn busy_files(path: &Path) -> ! {
    let memfd = sparse(GIB);
    rustix::io::pwrite(&memfd, &[1], 0).unwrap();
    let busy = memfd.try_clone().unwrap();
    std::thread::spawn(move || {
        let free = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for flags in [FallocateFlags::empty(), free].into_iter().cycle() {
            rustix::fs::fallocate(&busy, flags, 4096, (GIB - 4096) as u64).unwrap();
        }
    });
    with_all(connections(), || opened(path).unwrap(), |socket| map_and_unmap(path, socket, &memfd))
}

/// Maps a file again each time that it has grown by a page.
pub(super) fn growing_files(path: &Path) -> ! {
    with_all(
        4,
        || opened(path).unwrap(),
        |socket| {
            let memfd = sparse(4096);
            let mapped: Vec<u64> = (1..=64)
                .filter_map(|pages| {
                    rustix::fs::ftruncate(&memfd, pages << 12).unwrap();
                    rustix::io::pwrite(&memfd, &[1], (pages - 1) << 12).unwrap();
                    map(socket, &memfd, (pages as usize) << 12).ok()
                })
                .collect();
            if mapped.into_iter().any(|iova| ask(socket, &ClientRequest::Unmap { iova }, &[]).is_err()) {
                opened(path).into_iter().for_each(|new| *socket = new);
            }
        },
    )
}

/// Asks for mappings of many files of reserved huge pages, which are refused.
pub(super) fn huge_pages(path: &Path) -> ! {
    let huge = rustix::fs::memfd_create("huge", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB).unwrap();
    rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
    let segment = MapSegment { fd: 63.into(), reserved: 0.into(), offset: 0.into(), len: (2 << 20).into() };
    let request = ClientRequest::Map { access: 3, segments: &[segment; MAX_SEGMENTS] };
    with_all(4, || opened(path).unwrap(), |socket| drop(ask(socket, &request, &[huge.as_fd(); 64])))
}

/// Makes mappings of single pages, and asks for the end of all of them before it reads an answer.
pub(super) fn unmap_bursts(path: &Path) -> ! {
    let memfd = sparse(4096);
    rustix::io::pwrite(&memfd, &[1], 0).unwrap();
    with_all(
        connections(),
        || opened(path).unwrap(),
        |socket| {
            let mapped: Vec<u64> = (0..64).filter_map(|_| map(socket, &memfd, 4096).ok()).collect();
            let sent = mapped.iter().filter(|iova| send(socket, &ClientRequest::Unmap { iova: **iova }, &[])).count();
            let answered = (0..sent).filter(|_| receive(socket).is_ok()).count();
            if answered < 64 {
                opened(path).into_iter().for_each(|new| *socket = new);
            }
        },
    )
}

/// Gives the pages of a ring and of its completions back to the kernel while the card does its work.
pub(super) fn punched_rings(path: &Path) -> ! {
    let make = || Ring::new(client(path, 2 << 20), 6, MIB, |host| vec![to_card(host, 0, 64 << 10)]);
    with_all(4, make, |ring| {
        ring.write_descriptors();
        let filled = ring.try_fill();
        let (_, buf) = &ring.memory[0];
        punch(&buf.export().unwrap(), buf.len());
        if !filled || !ring.restart() {
            *ring = make();
        }
    })
}
