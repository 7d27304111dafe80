//! Every call of the driver fails once: the error is clear, nothing is leaked, and no memory is freed that is in use.

use std::os::fd::AsFd;
use std::sync::{Arc, LazyLock};

use dmalane_addr::{Access, CardAddr, SgIndex, SgTable, Span};
use dmalane_cuda::{Binds, Error, gpus};
use dmalane_device::{AddressSpaceKind, Device, DriverCopy, MemoryError, Placement, SpaceError};
use dmalane_dma::{AnonHeap, Heap, error_chain};
use dmalane_fake_cuda::{Fake, Seen};
use dmalane_queue::{Completion, DeviceAddr, Direction, OpError, Operation, Registered, Shape, StopReason, drain};
use dmalane_vm::{BindRequest, Bo};

use crate::gpu::{Gpu, Name, named};

/// Calls that only tidy up: their failure is no error.
const TIDY: &[&str] = &[
    "cuCtxPopCurrent_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuMemAddressFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuStreamDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// Calls with a fallback: an attribute is missing, an event cannot be had, a wait is repeated.
const FORGIVEN: &[&str] = &[
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDeviceGetAttribute",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

/// Invalid value, out of memory, invalid context, illegal address, launch failed, not supported, unknown.
const CODES: &[u32] = &[1, 2, 201, 700, 719, 801, 999];

/// The bytes that `everything` writes and compares.
static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| (0..600_000u32).map(|i| (i * 7 + i / 251) as u8).collect());

/// Everything that the crate does, once.
fn everything(name: &Name) -> Result<(), String> {
    let text = |e: &dyn std::error::Error| error_chain(e);
    gpus(name.library.as_deref()).map_err(|e| text(&e))?;
    let mut gpu = Gpu::open(name).map_err(|e| text(&e))?;
    let (table, span) = gpu.allocate(4 << 20)?;
    let at = |offset: u64| DeviceAddr::Card(span.first() + offset);
    let bytes = &*BYTES;
    gpu.write(0, at(0), bytes)?;
    // Two in one batch, and one that is too long for batches.
    let hosts = [gpu.host(&bytes[..4096])?, gpu.host(&bytes[4096..8192])?];
    let tickets = hosts.map(|host| gpu.queues[1].submit(Operation::write(host, at(1 << 20))).map_err(|e| text(&e)));
    let ended: Vec<Completion> = drain(&mut *gpu.queues[1], crate::gpu::LONG);
    for ticket in tickets {
        ticket.map(drop)?;
    }
    ended.into_iter().try_for_each(|c| c.result.map_err(|e| text(&e)))?;
    let gather = vec![gpu.host(&bytes[..1000])?, gpu.host(&bytes[1000..3000])?];
    gpu.run(0, Operation::gather(Direction::FromHost, gather, vec![(at(2 << 20), 500), (at(3 << 20), 2500)]))?;
    gpu.run(0, Operation::within(at(0), at(1 << 20), 300_000))?;
    // A read that must wait for a write on the other stream.
    let (write, read) = (gpu.host(&bytes[..5000])?, gpu.host(&[0; 5000])?);
    let tickets = [Operation::write(write, at(3 << 20)), Operation::read(read, at(3 << 20))]
        .map(|operation| gpu.queues[0].submit(operation).map_err(|e| text(&e)));
    let ended: Vec<Completion> = drain(&mut *gpu.queues[0], crate::gpu::LONG);
    for ticket in tickets {
        ticket.map(drop)?;
    }
    for completion in ended {
        completion.result.map_err(|e| text(&e))?;
        if dmalane_queue::conformance::host_bytes(&completion.operation) != bytes[..5000] {
            return Err("the read did not wait".to_owned());
        }
    }
    // By the driver alone.
    let mut driver = gpu.device.driver_copies().map_err(|e| text(&*e))?.ok_or("no copies by the driver")?;
    let host = gpu.host(bytes)?;
    let host = host.via.ok_or("it is registered")?;
    let copies =
        [(Direction::FromHost, 0u64, 3u64 << 20), (Direction::ToHost, 4096, 2 << 20)].map(|(direction, offset, to)| {
            let at = span.first() + to;
            DriverCopy { direction, host: host.clone(), offset, at, len: 4096 }
        });
    driver.copy(&copies, 2).map_err(|e| text(&*e))?;
    drop(driver);
    let shape = Shape { row: 100, rows: 7, host_pitch: 130, device_pitch: 200 };
    let rows = gpu.host(&bytes[..6 * 130 + 100])?;
    gpu.run(1, Operation::write(rows, at(0)).shaped(shape))?;
    gpu.run(1, Operation::within(at(0), at(1 << 20), 700).shaped(shape))?;
    for (offset, len, pattern) in [(0, 100, 0), (4, 1001, 0x0101_0202_0101_0202), (8, 77, 1), (3, 50, 2)] {
        gpu.run(0, Operation::fill(at(offset), len, pattern))?;
    }
    gpu.run(0, Operation::fill(at(0), 700, 0).shaped(shape))?;
    if gpu.read(0, at(1000), 3)? != bytes[1000..1003] && gpu.read(0, at(400_000), 1000)? != bytes[400_000..401_000] {
        return Err("other bytes".to_owned());
    }
    // Memory of the heap that the device prefers.
    let mut buf = gpu.registrar.heap(None).allocate(5000).map_err(|e| text(&e))?;
    buf[..5000].copy_from_slice(&bytes[..5000]);
    let buf = buf.share();
    let via = Registered::new(&*gpu.registrar, &buf, Access::RW).map_err(|e| text(&e))?;
    gpu.run(0, Operation::write((buf.into_slice(), via), at(0)))?;
    if gpu.read(1, at(0), 5000)? != bytes[..5000] {
        return Err("other bytes of the heap".to_owned());
    }
    if name.binds != Binds::Flat {
        bound(&mut gpu, &table)?;
    }
    drop(name.open().map_err(|e| text(&e))?.borrow(span).map_err(|e| text(&*e))?);
    // Where an attribute is missing, nothing is lent.
    if let Ok(lending) = gpu.device.lending() {
        lending.allow(true);
        let (table, span) = gpu.allocate(2 << 20)?;
        gpu.write(0, DeviceAddr::Card(span.first()), &bytes[..5000])?;
        let fds = lending.lend(span).map_err(|e| text(&*e))?;
        let fds: Vec<_> = fds.iter().map(|(fd, len)| (fd.as_fd(), *len)).collect();
        let lent = lending.take(&fds).map_err(|e| text(&*e))?;
        gpu.memory.free(table.segments()).map_err(|e| text(&e))?;
        if gpu.read(0, DeviceAddr::Card(lent.at.first()), 5000)? != bytes[..5000] {
            return Err("other bytes were lent".to_owned());
        }
    }
    let exported = gpu.device.gpu().dma_buf;
    drop(exported.then(|| gpu.device.export_dma_buf(span).map_err(|e| text(&e))).transpose()?);
    gpu.memory.free(table.segments()).map_err(|e| text(&e))
}

/// Binds, reads through the binding, unbinds.
fn bound(gpu: &mut Gpu, table: &SgTable<CardAddr>) -> Result<(), String> {
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(table).unwrap()));
    let space = gpu.device.address_space();
    assert!(matches!(space.kind(), AddressSpaceKind::Driver { name: "cuMemMap" }) && space.page().bytes() == 2 << 20);
    let range = space.reserve(table, 4 << 20).map_err(|e| error_chain(&e))?;
    let bind = BindRequest::Bind { va: range.first(), bo: bo.clone(), offset: 0, len: 4 << 20, access: Access::READ };
    space.apply(&[bind]).map_err(|e| error_chain(&e))?;
    let at = space.at(range.first());
    gpu.read(0, at, 5000)?;
    // The pages change places, then the second is taken away.
    let space = gpu.device.address_space();
    let page = |i: u64| Span::new(range.first() + (i << 21), 2 << 20).unwrap();
    let swap = |i: u64| {
        let (va, offset) = (page(i).first(), (1 - i) << 21);
        BindRequest::Bind { va, bo: bo.clone(), offset, len: 2 << 20, access: Access::RW }
    };
    let batch = [swap(0), swap(1), BindRequest::Prefetch(page(0)), BindRequest::Unbind(page(1))];
    space.apply(&batch).map_err(|e| error_chain(&e))?;
    let third = Span::new(range.first() + (4 << 20), 2 << 20).unwrap();
    let odd = Span::new(range.first() + 4096, 4096).unwrap();
    let mut gone = SgTable::new();
    gone.push(CardAddr::new(1 << 46), 2 << 20).unwrap();
    let gone = Arc::new(Bo::new(2, SgIndex::from_table(&gone).unwrap()));
    for refused in [
        BindRequest::Unbind(third),
        BindRequest::Unbind(odd),
        BindRequest::Null { va: range.first(), len: 1 },
        BindRequest::Bind { va: range.first(), bo: gone, offset: 0, len: 2 << 20, access: Access::READ },
    ] {
        let refused = space.apply(&[swap(1), refused]).unwrap_err();
        assert!(
            matches!(refused, SpaceError::NotReserved(_) | SpaceError::NoTables | SpaceError::Refused(_)),
            "{refused:?}"
        );
    }
    gpu.read(0, at, 5000)?;
    let second = gpu.device.address_space().at(page(1).first());
    match gpu.read(0, second, 5000) {
        Ok(_) => panic!("nothing is bound there, nor was it by a batch that is refused"),
        Err(e) if e.contains("MMU") => {}
        Err(e) => return Err(e),
    }
    let unbound = gpu.device.address_space().release(range);
    unbound.map_err(|e| error_chain(&e))
}

#[test]
fn every_call_fails_once() {
    let fake = Fake::turn();
    // The name of the function is in the error, unless its failure only means that something is not there.
    let (mut clear, mut missed) = (0, 0);
    // The first and the last of each, where memory is registered; all of them, and elsewhere, in scripts/nightly.
    let long = std::env::var_os("DMALANE_EVERY_CALL").is_some();
    let ways = [(Binds::Flat, 1), (Binds::CuMemMap, 1), (Binds::Flat, 0)];
    for (binds, register) in ways.into_iter().take(if long { 3 } else { 2 }) {
        fake.set("host-register", register);
        let name = named(&fake, binds);
        everything(&name).unwrap();
        let Seen { leaks, violations, calls } = fake.seen();
        assert!(leaks.is_empty() && violations.is_empty(), "{leaks:?} {violations:?}");
        for call in &calls {
            let before = fake.calls(call);
            everything(&name).unwrap();
            let made = fake.calls(call) - before;
            let mut which = if long { (1..=made).collect() } else { vec![1, made] };
            which.retain(|n| (1..=made).contains(n));
            which.sort_unstable();
            which.dedup();
            for nth in which {
                // Of one call only, and those that the context does not survive.
                for code in if nth == 1 { CODES } else { &[999] } {
                    // Where it is not supported, the driver copies memory as it is: `host-register` above.
                    if (&**call, *code) == ("cuMemHostRegister_v2", 801) {
                        continue;
                    }
                    let when =
                        format!("{call}, call {nth} of {made}, fails with {code}, {binds:?}, host-register {register}");
                    fake.fail(call, nth, *code);
                    let result = everything(&name);
                    let failed = fake.has_failed();
                    fake.heal();
                    // How often the driver is asked whether something has ended varies.
                    if !failed {
                        missed += 1;
                        continue;
                    }
                    fake.assert_clean(&when);
                    match &result {
                        Ok(()) => assert!(TIDY.contains(&&**call) || FORGIVEN.contains(&&**call), "{when}: no error"),
                        Err(e) => {
                            // Operations have only the code.
                            let names = e.contains(call.trim_end_matches("_v2")) || e.contains(&format!("{code:#x}"));
                            assert!(names || FORGIVEN.contains(&&**call), "{when}: {e}");
                            clear += 1;
                        }
                    }
                }
            }
            everything(&name).unwrap_or_else(|e| panic!("after {call} had failed: {e}"));
        }
        fake.assert_clean("at the end");
    }
    assert!(clear > 100 && missed < clear / 3, "{clear} errors, {missed} calls were not made");
}

#[test]
fn every_call_that_breaks_the_context_is_named() {
    let calls = {
        let fake = Fake::turn();
        everything(&named(&fake, Binds::CuMemMap)).unwrap();
        fake.seen().calls
    };
    let mut clear = 0;
    for call in &calls {
        let fake = Fake::turn();
        // An illegal address: all later calls answer the same.
        fake.fail_for_good(call, 1, 700);
        let result = everything(&named(&fake, Binds::CuMemMap));
        let Seen { violations, .. } = fake.seen();
        // A broken context takes no calls that would unregister memory.
        let clean = violations.is_empty() || violations == "a context was released with host memory registered";
        assert!(clean, "{call}: {violations}");
        match result {
            // The last calls tidy up.
            Ok(()) => assert!(!fake.has_failed() || TIDY.contains(&&**call), "{call}: no error"),
            Err(e) => {
                let names = e.contains("ILLEGAL_ADDRESS") || e.contains("0x2bc") || e.contains("failed");
                assert!(names, "{call}: {e}");
                clear += 1;
            }
        }
    }
    assert!(clear > 20, "{clear} errors");
}

#[test]
fn where_registration_is_refused_the_driver_allocates_host_memory() {
    let fake = Fake::turn();
    fake.fail("cuMemHostRegister_v2", 1, 801);
    let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
    let notes = gpu.device.info().notes.join("; ");
    assert!(notes.contains("pinned by cuMemHostAlloc") && notes.contains("cuMemHostRegister"), "{notes}");
    let heap = gpu.registrar.heap(None);
    assert_eq!(heap.name(), "cuMemHostAlloc");
    let (table, span) = gpu.allocate(2 << 20).unwrap();
    let mut buf = heap.allocate(5000).unwrap();
    assert!(buf.iter().all(|b| *b == 0) && buf.len() == 8192);
    buf.fill(7);
    let buf = buf.share();
    let via = Registered::new(&*gpu.registrar, &buf, Access::RW).unwrap();
    let at = DeviceAddr::Card(span.first());
    let back = gpu.run(0, Operation::write((buf.into_slice(), via), at)).unwrap();
    let back = gpu.run(0, Operation::read(back.into_host().pop().unwrap(), at)).unwrap();
    assert_eq!(dmalane_queue::conformance::host_bytes(&back), [7; 8192]);
    assert_eq!(heap.stats().live, 8192);
    drop(back);
    assert_eq!((heap.stats().live, fake.calls("cuMemHostAlloc"), fake.calls("cuMemFreeHost")), (0, 1, 1));
    fake.fail("cuMemHostAlloc", 1, 2);
    assert!(error_chain(&heap.allocate(5000).unwrap_err()).contains("cuMemHostAlloc"));
    gpu.memory.free(table.segments()).unwrap();
    drop((gpu, heap));
    fake.assert_clean("with host memory of the driver");
}

#[test]
fn memory_of_a_broken_gpu_is_never_freed() {
    for call in ["cuEventQuery", "cuEventRecord", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"] {
        let fake = Fake::turn();
        let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
        let (_, span) = gpu.allocate(2 << 20).unwrap();
        let at = DeviceAddr::Card(span.first());
        let hosts = [gpu.host(&[1; 500_000]).unwrap(), gpu.host(&[2; 500_000]).unwrap()];
        let shares = hosts.each_ref().map(|host| host.slice.reference());
        fake.hold(true);
        let [first, second] = hosts;
        let _first = gpu.queues[0].submit(Operation::write(first, at)).unwrap();
        gpu.queues[0].flush();
        fake.fail_for_good(call, 1, 719);
        let _second = gpu.queues[0].submit(Operation::write(second, at)).unwrap();
        let mut done = Vec::new();
        gpu.queues[0].poll(&mut done);
        if call != "cuStreamSynchronize" {
            let Some(StopReason::Lost(why)) = gpu.queues[0].halted() else { panic!("{call}: it has halted") };
            let Some(Error::Lost(cause)) = why.downcast_ref() else { panic!("{why:?}") };
            assert!(matches!(&**cause, Error::Call { name, .. } if name == "CUDA_ERROR_LAUNCH_FAILED"), "{why}");
        }
        assert!(gpu.queues[0].poll(&mut done) == 0 && done.is_empty(), "nothing says that it has ended");
        drop(gpu);
        let Seen { violations, leaks, .. } = fake.seen();
        assert!(violations.is_empty(), "{call}: {violations}");
        assert!(leaks.contains("registrations") && leaks.contains("mappings"), "{call}: {leaks}");
        assert!(shares.iter().any(|share| !share.is_last()), "{call}: the GPU may still write there");
    }
}

#[test]
fn whatever_meets_a_lost_context_says_so() {
    // Illegal address, context destroyed, an uncorrectable error of the memory, unknown; and one that loses nothing.
    // Also a client that MPS has ended, and an external device that failed.
    for (code, lost) in [700, 709, 214, 999, 810, 911].map(|code| (code, true)).into_iter().chain([(205, false)]) {
        let fake = Fake::turn();
        let mut gpu = Gpu::open(&named(&fake, Binds::CuMemMap)).unwrap();
        let (table, span) = gpu.allocate(4 << 20).unwrap();
        let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
        let space = gpu.device.address_space();
        let bound = space.reserve(&table, 4 << 20).unwrap();
        let bind = |va| [BindRequest::Bind { va, bo: bo.clone(), offset: 0, len: 4 << 20, access: Access::RW }];
        space.apply(&bind(bound.first())).unwrap();
        let free = space.reserve(&table, 4 << 20).unwrap();
        let host = gpu.host(&[1; 4096]).unwrap();
        let buf = AnonHeap::new().allocate(4096).unwrap().share();
        fake.fail_for_good("cuCtxPushCurrent_v2", 1, code);

        let MemoryError::Driver { source: memory, .. } = gpu.memory.allocate(2 << 20, &Placement::Default).unwrap_err()
        else {
            panic!("{code}: memory")
        };
        let registered = Registered::new(&*gpu.registrar, &buf, Access::RW).map(drop).unwrap_err();
        let dmalane_dma::Error::Backend(registered) = registered else { panic!("{code}: {registered:?}") };
        let space = gpu.device.address_space();
        let SpaceError::Driver(reserved) = space.reserve(&table, 4 << 20).unwrap_err() else { panic!("{code}: range") };
        let SpaceError::Driver(bind) = space.apply(&bind(free.first())).unwrap_err() else { panic!("{code}: bind") };
        let SpaceError::Invalidate(unbound) = space.release(bound).unwrap_err() else { panic!("{code}: unbind") };
        for error in [memory, registered, reserved, bind, unbound] {
            let says = error_chain(&*error).contains("the GPU's context is lost");
            assert!(matches!(error.downcast_ref(), Some(Error::Lost(_))) == lost && says == lost, "{code}: {error}");
        }
        let exported = gpu.device.export_dma_buf(span);
        assert_eq!(matches!(exported, Err(Error::Lost(_))), lost, "{code}: {exported:?}");
        // A stream cannot be asked any more after either.
        let _ticket = gpu.queues[0].submit(Operation::write(host, DeviceAddr::Card(span.first()))).unwrap();
        gpu.queues[0].flush();
        let halted = gpu.queues[0].halted().unwrap();
        assert!(matches!(halted, StopReason::Lost(_)) == lost && !gpu.queues[0].restart(), "{code}: {halted:?}");
    }
}

#[test]
fn a_queue_that_halted_by_an_error_of_one_call_ends_its_operations() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
    let (_, span) = gpu.allocate(2 << 20).unwrap();
    fake.fail("cuEventQuery", 1, 999);
    let host = gpu.host(&[1; 500_000]).unwrap();
    let share = host.slice.reference();
    let _only = gpu.queues[0].submit(Operation::write(host, DeviceAddr::Card(span.first()))).unwrap();
    let ended = drain(&mut *gpu.queues[0], crate::gpu::LONG);
    assert!(matches!(&ended[..], [Completion { result: Err(OpError::Stopped(_)), .. }]), "{ended:?}");
    drop(ended);
    assert!(share.is_last());
    drop(share);
    assert!(!gpu.queues[0].restart(), "the driver said that the context is lost");
    assert!(gpu.write(0, DeviceAddr::Card(span.first()), b"x").unwrap_err().contains("cuEventQuery failed"));
    // The other queue did not see it.
    gpu.write(1, DeviceAddr::Card(span.first()), b"x").unwrap();
    drop(gpu);
    fake.assert_clean("halted");
}

#[test]
fn memory_is_freed_behind_a_stream_that_did_not_confirm_its_end() {
    let fake = Fake::turn();
    let mut gpu = Gpu::open(&named(&fake, Binds::Flat)).unwrap();
    let (table, span) = gpu.allocate(2 << 20).unwrap();
    let host = gpu.host(&[1; 500_000]).unwrap();
    fake.hold(true);
    let _ticket = gpu.queues[0].submit(Operation::write(host, DeviceAddr::Card(span.first()))).unwrap();
    gpu.queues[0].flush();
    fake.fail("cuStreamSynchronize", 1, 999);
    fake.fail("cuStreamSynchronize", 2, 999);
    drop(gpu.queues.remove(0));
    assert!(fake.has_failed());
    fake.heal();
    std::thread::scope(|scope| {
        let freed = scope.spawn(|| gpu.memory.free(table.segments()).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!freed.is_finished(), "the stream still has the copy");
        fake.hold(false);
    });
    assert_eq!(fake.seen().violations, "");
}
