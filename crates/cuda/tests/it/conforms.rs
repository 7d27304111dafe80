//! The suites of devices and queues.

use dmalane_addr::{Access, SgIndex, Span};
use dmalane_cuda::{Binds, Error, gpus};
use dmalane_device::conformance::suite;
use dmalane_device::{AddressSpaceKind, Device};
use dmalane_dma::error_chain;
use dmalane_fake_cuda::Fake;
use dmalane_queue::conformance::{self, Fixture};
use dmalane_queue::{DeviceAddr, DeviceQueue, HostSlice, OpError, Operation, QueueAddr, drain};
use dmalane_vm::{BindRequest, Bo};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::gpu::{Gpu, LONG, Name, named, real};

fn conforms(name: &Name) {
    suite(|| Box::new(name.open().unwrap()));
}

#[test]
fn the_fake_gpu_takes_the_suite_of_devices() {
    let fake = Fake::turn();
    for binds in [Binds::Flat, Binds::CuMemMap] {
        conforms(&named(&fake, binds));
        fake.assert_clean(&format!("{binds:?}"));
        assert!(fake.calls("cuMemImportFromShareableHandle") > 0, "memory was lent, in a flat space");
    }
    fake.set("host-register", 0);
    conforms(&named(&fake, Binds::Flat));
    fake.assert_clean("without registration");
    fake.set("virtual-memory", 0);
    let refused = named(&fake, Binds::Flat).open().err().unwrap();
    assert!(error_chain(&refused).starts_with("the GPU does not support virtual memory (cuMemMap)"), "{refused}");
    fake.assert_clean("without virtual memory");
}

#[test]
fn a_real_gpu_takes_the_suite_of_devices() {
    for binds in [Binds::Flat, Binds::CuMemMap] {
        match real(binds) {
            Some(name) => conforms(&name),
            None => println!("skipped: DMALANE_TEST_CUDA names no GPU"),
        }
    }
}

/// A queue to memory of a device that is opened anew for each; the other queue looks at that memory.
struct Queues {
    name: Name,
    now: Option<(Gpu, DeviceAddr)>,
    rounds: u64,
}

/// Bytes of the target: an allocation, so that the next address is nobody's.
const TARGET: u64 = 2 << 20;

impl Queues {
    fn new(name: Name, rounds: u64) -> Self {
        let mut this = Self { name, now: None, rounds };
        drop(this.queue());
        this
    }

    fn now(&mut self) -> &mut (Gpu, DeviceAddr) {
        self.now.as_mut().expect("opened")
    }
}

impl Fixture for Queues {
    type Queue = Box<DeviceQueue>;

    fn queue(&mut self) -> Box<DeviceQueue> {
        self.now = None;
        let mut gpu = Gpu::open(&self.name).unwrap();
        let (table, span) = gpu.allocate(TARGET).unwrap();
        let mut at = DeviceAddr::Card(span.first());
        if self.name.binds == Binds::CuMemMap {
            let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
            let space = gpu.device.address_space();
            let va = space.reserve(&table, TARGET).unwrap().first();
            space
                .apply(&[BindRequest::Bind { va, bo: bo.clone(), offset: 0, len: TARGET, access: Access::RW }])
                .unwrap();
            at = space.at(va);
        }
        let queue = gpu.queues.remove(1);
        self.now = Some((gpu, at));
        queue
    }

    fn target_len(&self) -> u64 {
        TARGET
    }

    fn at(&self, offset: u64) -> DeviceAddr {
        let (_, at) = self.now.as_ref().expect("opened");
        at.advance(offset).unwrap()
    }

    fn host(&mut self, len: usize) -> HostSlice {
        self.now().0.host(&vec![0; len]).unwrap()
    }

    fn peek(&mut self) -> Vec<u8> {
        let at = self.at(0);
        self.now().0.read(0, at, TARGET).unwrap()
    }

    fn poke(&mut self, bytes: &[u8]) {
        let at = self.at(0);
        self.now().0.write(0, at, bytes).unwrap();
    }

    fn rounds(&self) -> u64 {
        self.rounds
    }
}

#[test]
fn the_fake_gpu_takes_the_suite_of_queues() {
    let fake = Fake::turn();
    for (binds, rounds) in [(Binds::Flat, 40), (Binds::CuMemMap, 10)] {
        conformance::suite(&mut Queues::new(named(&fake, binds), rounds));
        fake.assert_clean("the suite of queues");
    }
    assert!(fake.calls("cuMemcpyBatchAsync_v2") > 0, "small copies go in batches");
}

#[test]
fn a_real_gpu_takes_the_suite_of_queues() {
    for binds in [Binds::Flat, Binds::CuMemMap] {
        match real(binds) {
            Some(name) => conformance::suite(&mut Queues::new(name, 60)),
            None => println!("skipped: DMALANE_TEST_CUDA names no GPU"),
        }
    }
}

#[test]
fn gpus_are_listed_and_found_by_number_and_uuid() {
    let fake = Fake::turn();
    fake.set("gpus", 2);
    let all = gpus(Some(fake.path())).unwrap();
    let uuid = "GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1";
    assert_eq!((all.len(), &*all[1].uuid, &*all[1].pci), (2, uuid, "0000:01:00.0"));
    assert_eq!((all[0].memory, all[0].driver, all[0].copy_engines), (256 << 20, (13, 0), 2));
    assert!(all[0].virtual_memory && all[0].dma_buf && all[0].host_register);
    for which in ["1", uuid, "GPU-A1A1", "gpu-a1a1"] {
        let name = Name { gpu: which.to_owned(), ..named(&fake, Binds::Flat) };
        assert_eq!(name.open().unwrap().gpu().number, 1);
    }
    let missing = Name { gpu: "2".to_owned(), ..named(&fake, Binds::Flat) };
    let error = missing.open().err().unwrap();
    assert!(
        error_chain(&error).contains("no GPU 2; the driver has 0 (GPU-a0a0a0a0-") && error.fix().is_some(),
        "{error}"
    );
    for short in ["GPU-", "GPU-a1", "x"] {
        let name = Name { gpu: short.to_owned(), ..named(&fake, Binds::Flat) };
        assert!(matches!(name.open().err(), Some(Error::NoGpu { .. })), "{short}");
    }
    // Parts of a GPU have its UUID, and one of their own.
    fake.set("parts", 1);
    let parts: Vec<String> = gpus(Some(fake.path())).unwrap().into_iter().map(|gpu| gpu.uuid).collect();
    assert!(parts[0].starts_with("MIG-b0b0b0b0-") && parts[1].starts_with("MIG-b1b1b1b1-"), "{parts:?}");
    let part = Name { gpu: "MIG-b1b1".to_owned(), ..named(&fake, Binds::Flat) };
    assert_eq!(part.open().unwrap().gpu().number, 1);
    fake.set("gpus", 0);
    let error = gpus(Some(fake.path())).unwrap_err();
    assert!(error_chain(&error).contains("CUDA_ERROR_NO_DEVICE") && error.fix().is_some(), "{error}");
    fake.assert_clean("listed");
    let error = gpus(Some("/nowhere/libcuda.so")).unwrap_err();
    assert!(matches!(error, Error::Library { .. }) && error.fix().is_some(), "{error}");
    // A library that is not a driver.
    let error = gpus(Some("libc.so.6")).unwrap_err();
    assert!(matches!(error, Error::Symbol { .. }) && error_chain(&error).contains("cuGetErrorName"), "{error}");
}

#[test]
fn memory_is_exported_and_is_that_of_the_driver() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
    assert_eq!(gpu.device.address_space().kind(), AddressSpaceKind::Flat);
    let (table, span) = gpu.allocate(3 << 20).unwrap();
    assert_eq!(span.len(), 4 << 20, "pages of 2 MiB");
    let part = span.sub(4096, 8192).unwrap();
    drop(gpu.device.export_dma_buf(part).unwrap());
    let beyond = Span::new(span.first(), 8 << 20).unwrap();
    assert!(matches!(gpu.device.export_dma_buf(beyond), Err(Error::NotAllocated(_))));
    // More than there is: the driver's reason, and what is free.
    let (other, _) = gpu.allocate(200 << 20).unwrap();
    fake.set("memory", 208 << 20);
    let error = gpu.allocate(8 << 20).unwrap_err();
    assert!(error.contains("out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2); 4194304 bytes of the GPU's"), "{error}");
    gpu.memory.free(other.segments()).unwrap();
    gpu.allocate(8 << 20).unwrap();
    gpu.memory.free(table.segments()).unwrap();
    drop(gpu);
    fake.assert_clean("exported");
}

#[test]
fn two_devices_share_registrations_and_partly_registered_memory_is_refused() {
    let fake = Fake::turn();
    fake.set("gpus", 2);
    let open = |n: u32| Gpu::open(&Name { gpu: n.to_string(), ..named(&fake, Binds::Flat) }).unwrap();
    let (mut a, mut b) = (open(0), open(1));
    let buf = dmalane_dma::Heap::allocate(&dmalane_dma::AnonHeap::new(), 64 << 10).unwrap().share();
    let via = |gpu: &Gpu, range| {
        let access = dmalane_addr::Access::RW;
        dmalane_queue::Registered::of_range(&*gpu.registrar, &buf.reference(), range, access)
    };
    // Each device has tried whether it may.
    assert_eq!((fake.calls("cuMemHostRegister_v2"), fake.calls("cuMemHostUnregister")), (2, 2));
    let whole = via(&a, 0..64 << 10).unwrap();
    let part = via(&b, 4096..8192).unwrap();
    assert_eq!(fake.calls("cuMemHostRegister_v2"), 3);
    drop(whole);
    assert_eq!(fake.calls("cuMemHostUnregister"), 2, "the other device uses it");
    drop(part);
    assert_eq!(fake.calls("cuMemHostUnregister"), 3);
    let first = via(&a, 0..8192).unwrap();
    let error = error_chain(&via(&b, 4096..16384).unwrap_err());
    assert!(error.contains("partly registered"), "{error}");
    drop(first);
    let (at_a, at_b) = (a.allocate(4096).unwrap().1, b.allocate(4096).unwrap().1);
    a.write(0, DeviceAddr::Card(at_a.first()), b"for a").unwrap();
    b.write(1, DeviceAddr::Card(at_b.first()), b"for b").unwrap();
    assert_eq!(a.read(1, DeviceAddr::Card(at_a.first()), 5).unwrap(), b"for a");
    assert!(a.read(0, DeviceAddr::Card(at_b.first()), 5).is_err(), "memory of another device");
    drop((a, b, buf));
    fake.assert_clean("two devices");
}

#[test]
fn memory_of_another_library_is_used_while_it_is_lent() {
    let fake = Fake::turn();
    fake.set("gpus", 2);
    let open = |n: u32| Gpu::open(&Name { gpu: n.to_string(), ..named(&fake, Binds::Flat) }).unwrap();
    // Of what another device has allocated on the same GPU this one knows as little as of PyTorch's memory.
    let (mut ours, mut other, mut far) = (open(0), open(0), open(1));
    let (_, span) = other.allocate(2 << 20).unwrap();
    let (_, own) = ours.allocate(2 << 20).unwrap();
    let (_, elsewhere) = far.allocate(2 << 20).unwrap();
    let at = |offset: u64| DeviceAddr::Card(span.first()).advance(offset).unwrap();
    assert!(ours.write(0, at(0), b"not lent").is_err());
    let part = span.sub(4096, 8192).unwrap();
    let lent = ours.device.borrow(part).unwrap();
    ours.write(0, at(4096), b"lent").unwrap();
    ours.write(1, at(4096 + 8192 - 3), b"end").unwrap();
    assert_eq!(other.read(0, at(4096), 4).unwrap(), b"lent");
    assert_eq!(other.read(0, at(4096 + 8192 - 3), 3).unwrap(), b"end");
    assert!(ours.write(0, at(4096 + 8192 - 2), b"out").is_err(), "a byte behind it");
    assert!(ours.write(0, at(4095), b"in").is_err(), "a byte before it");
    let host = vec![0u8; 8192];
    let of_host = Span::new(dmalane_addr::CardAddr::new(host.as_ptr().addr() as u64), 4096).unwrap();
    let beyond = Span::new(span.first(), (2 << 20) + 1).unwrap();
    for refused in [part, span, own, elsewhere, of_host, beyond] {
        assert!(ours.device.borrow(refused).is_err(), "{refused:?}");
    }
    drop(lent);
    assert!(ours.write(0, at(4096), b"given back").is_err());
    drop(ours.device.borrow(span).unwrap());
    drop((ours, other, far));
    fake.assert_clean("lent");
}

/// Memory of a GPU with these bytes at its beginning, of which nothing but a descriptor is left.
fn lent_memory(fake: &Fake, bytes: &[u8]) -> OwnedFd {
    let mut gpu = Gpu::open(&named(fake, Binds::Flat)).unwrap();
    let lending = gpu.device.lending().unwrap();
    lending.allow(true);
    let (_, span) = gpu.allocate(4 << 20).unwrap();
    gpu.write(0, DeviceAddr::Card(span.first()), bytes).unwrap();
    lending.lend(span).unwrap().pop().unwrap().0
}

/// Set for the process that [`another_process_reads_what_was_lent`] starts.
const CHILD: &str = "DMALANE_TEST_LENT_ON_STDIN";

#[test]
fn another_process_reads_what_was_lent() {
    let fake = Fake::turn();
    if std::env::var_os(CHILD).is_some() {
        let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
        let take = |len| gpu.device.lending().unwrap().take(&[(std::io::stdin().as_fd(), len)]);
        assert!(take(2 << 20).is_err(), "half of it");
        let lent = take(4 << 20).unwrap();
        let at = DeviceAddr::Card(lent.at.first());
        assert_eq!(gpu.read(0, at, 4).unwrap(), b"lent");
        assert!(gpu.write(0, at, b"x").is_err(), "for reading");
        drop((lent, gpu));
        assert_eq!(fake.copied(), 0, "nothing is copied onto the GPU");
        return fake.assert_clean("lent by another process");
    }
    let fd = lent_memory(&fake, b"lent");
    fake.assert_clean("only a descriptor is left");
    let exe = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(exe);
    command.args(["--exact", "conforms::another_process_reads_what_was_lent", "--nocapture"]).env(CHILD, "1");
    let output = command.stdin(fd).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn memory_of_another_gpu_is_not_taken() {
    let fake = Fake::turn();
    fake.set("gpus", 2);
    let fd = lent_memory(&fake, b"of GPU 0");
    let other = Name { gpu: "1".to_owned(), ..named(&fake, Binds::Flat) }.open().unwrap();
    let refused = other.lending().unwrap().take(&[(fd.as_fd(), 4 << 20)]).unwrap_err();
    assert_eq!(refused.to_string(), "the memory is that of GPU 0");
    drop(other);
    fake.assert_clean("another GPU");
    let bound = named(&fake, Binds::CuMemMap).open().unwrap();
    assert!(bound.lending().err().unwrap().to_string().contains("(vmm)"));
    drop(bound);
    fake.assert_clean("in pages");
}

#[test]
fn operations_that_the_driver_has_not_got_are_taken_back() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
    let (_, span) = gpu.allocate(4096).unwrap();
    let at = DeviceAddr::Card(span.first());
    fake.hold(true);
    let hosts = [b"first", b"later"].map(|bytes| gpu.host(bytes).unwrap());
    let [first, later] = hosts.map(|host| Operation::write(host, at));
    let queue = &mut gpu.queues[0];
    let first = queue.submit(first).unwrap();
    queue.flush();
    let later = queue.submit(later).unwrap();
    assert!(matches!(queue.cancel(first), dmalane_queue::Cancelled::TooLate));
    assert!(matches!(queue.cancel(later), dmalane_queue::Cancelled::Removed(_)));
    let mut done = Vec::new();
    assert_eq!((queue.poll(&mut done), queue.in_flight()), (0, 1));
    let begun = std::time::Instant::now();
    assert_eq!(queue.wait(&mut done, std::time::Duration::from_millis(20)), 0);
    assert!(begun.elapsed() >= std::time::Duration::from_millis(20));
    fake.hold(false);
    assert_eq!(drain(&mut **queue, LONG).len(), 1);
    assert_eq!(gpu.read(1, at, 5).unwrap(), b"first");
    drop(gpu);
    fake.assert_clean("taken back");
}

#[test]
fn writes_to_the_same_memory_by_two_addresses_keep_their_order() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::CuMemMap)).unwrap();
    let (table, span) = gpu.allocate(2 << 20).unwrap();
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
    let space = gpu.device.address_space();
    let ranges = [(); 2].map(|()| space.reserve(&table, 2 << 20).unwrap());
    for range in &ranges {
        space
            .apply(&[BindRequest::Bind {
                va: range.first(),
                bo: bo.clone(),
                offset: 0,
                len: 2 << 20,
                access: Access::RW,
            }])
            .unwrap();
    }
    let card = DeviceAddr::Card(span.first());
    let [a, b] = ranges.each_ref().map(|range| space.at(range.first()));
    for (i, (first, second)) in [(a, b), (b, a), (card, a), (a, card)].into_iter().enumerate() {
        let bytes = [format!("first {i}"), format!("later {i}")];
        let hosts = bytes.each_ref().map(|bytes| gpu.host(bytes.as_bytes()).unwrap());
        for (host, at) in hosts.into_iter().zip([first, second]) {
            let _ticket = gpu.queues[0].submit(Operation::write(host, at)).unwrap();
        }
        assert!(drain(&mut *gpu.queues[0], LONG).iter().all(|end| end.result.is_ok()));
        assert_eq!(gpu.read(0, card, 7).unwrap(), bytes[1].as_bytes(), "{first:?}, {second:?}");
    }
    for range in ranges {
        gpu.device.address_space().release(range).unwrap();
    }
    drop(gpu);
    fake.assert_clean("two addresses");
}

#[test]
fn a_small_copy_whose_memory_is_freed_before_the_doorbell_is_refused() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
    let (table, span) = gpu.allocate(2 << 20).unwrap();
    let host = gpu.host(b"small").unwrap();
    let _ticket = gpu.queues[0].submit(Operation::write(host, DeviceAddr::Card(span.first()))).unwrap();
    gpu.memory.free(table.segments()).unwrap();
    gpu.queues[0].flush();
    let ended = drain(&mut *gpu.queues[0], LONG);
    assert_eq!(ended[0].result, Err(OpError::NoCardMemory(span.first())));
    drop((ended, gpu));
    fake.assert_clean("freed before the doorbell");
}

#[test]
fn a_small_copy_whose_address_is_unbound_before_the_doorbell_is_an_mmu_fault() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::CuMemMap)).unwrap();
    let (table, _) = gpu.allocate(2 << 20).unwrap();
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
    let space = gpu.device.address_space();
    let range = space.reserve(&table, 2 << 20).unwrap();
    space
        .apply(&[BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: 2 << 20, access: Access::RW }])
        .unwrap();
    let at = space.at(range.first());
    let host = gpu.host(b"small").unwrap();
    let _ticket = gpu.queues[0].submit(Operation::write(host, at)).unwrap();
    gpu.device.address_space().release(range).unwrap();
    gpu.queues[0].flush();
    let ended = drain(&mut *gpu.queues[0], LONG);
    assert_eq!(ended[0].result, Err(OpError::MmuFault(range.first())));
    drop((ended, gpu));
    fake.assert_clean("unbound before the doorbell");
}

#[test]
fn a_queue_that_is_dropped_while_memory_is_freed_is_not_waited_for_any_more() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
    let (_, busy) = gpu.allocate(2 << 20).unwrap();
    let (table, _) = gpu.allocate(2 << 20).unwrap();
    let idle = gpu.queues.pop().unwrap();
    let host = gpu.host(b"held").unwrap();
    fake.hold(true);
    let _ticket = gpu.queues[0].submit(Operation::write(host, DeviceAddr::Card(busy.first()))).unwrap();
    gpu.queues[0].flush();
    std::thread::scope(|scope| {
        let memory = &mut gpu.memory;
        let _freed = scope.spawn(move || memory.free(table.segments()).unwrap());
        // It waits for the first queue by now, and has the second before it.
        std::thread::sleep(Duration::from_millis(50));
        let _dropped = scope.spawn(move || drop(idle));
        std::thread::sleep(Duration::from_millis(50));
        fake.hold(false);
    });
    assert_eq!(drain(&mut *gpu.queues[0], LONG).len(), 1);
    drop(gpu);
    fake.assert_clean("dropped while memory was freed");
}
