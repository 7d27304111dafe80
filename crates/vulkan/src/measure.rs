//! Measurements beside the same work written by hand, as ignored tests: `cargo test --release -p dmalane-vulkan --
//! --ignored --nocapture measure`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ash::vk;
use dmalane_addr::{Access, CardAddr, SgIndex};
use dmalane_device::{Device, Placement};
use dmalane_dma::Heap;
use dmalane_queue::{DeviceAddr, DeviceQueue, Direction, HostSlice, Operation, Queue, Refusal, Registered};
use dmalane_vm::{BindRequest, Bo};

use crate::channel::Channel;
use crate::gpu::{Buffer, SparseBind, Timeline};
use crate::sparse::Granule;
use crate::{VulkanDevice, VulkanOptions};

const ROUNDS: usize = 15;
const LONG: Duration = Duration::from_secs(60);

fn open(sparse: bool) -> VulkanDevice {
    let name = std::env::var("DMALANE_TEST_GPU").unwrap_or_else(|_| "0".to_owned());
    let device =
        VulkanDevice::open(&name, &VulkanOptions { sparse, validation: None, ..VulkanOptions::default() }).unwrap();
    println!("{}: {}", device.gpu(), device.info().notes.join("; "));
    device
}

/// The median, and the fastest.
fn median(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

/// Numbers below `n` in an order in which none follows the one before it.
fn scattered(n: u64) -> impl Iterator<Item = u64> {
    let step = (n / 2..).find(|s| gcd(*s, n) == 1 && *s > 0).unwrap_or(1);
    (0..n).map(move |i| i * step % n)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[test]
#[ignore = "prints figures and takes a minute: run it with --ignored --nocapture on a quiet machine"]
fn measure_copies() {
    let mut device = open(false);
    let (registrar, mut memory, mut queues) = (device.registrar(), device.memory(), device.take_queues());
    let (gpu, heap) = (device.shared().clone(), registrar.heap(None));
    println!("direction        bytes  copies     ours GB/s  by hand GB/s   ours/by hand (medians; fastest)");
    for len in [4 << 10, 64 << 10, 1 << 20, 16 << 20u64] {
        let copies = ((256u64 << 20) / len).min(1000);
        let total = copies * len;
        let table = memory.allocate(total, &Placement::Default).unwrap();
        let at = table.segments().next().unwrap().addr.bits();
        let mut buf = heap.allocate(total as usize).unwrap();
        let byte = |i: usize| (i ^ (i >> 8) ^ (i >> 16)) as u8;
        buf.iter_mut().enumerate().for_each(|(i, b)| *b = byte(i));
        let buf = buf.share();
        let via = Registered::new(&*registrar, &buf, Access::RW).unwrap();
        let imported = gpu.import(&buf.reference(), 0, total as usize).unwrap();
        let buffer = device.buffer_at(CardAddr::new(at)).unwrap();
        let mut channel = Channel::<()>::new(&gpu, 0).unwrap();
        let mut slices = Vec::new();
        let mut rest = buf.into_part();
        for _ in 0..copies {
            slices.push(rest.split_off_front(len as usize).unwrap());
        }
        for direction in [Direction::FromHost, Direction::ToHost] {
            let (mut ours, mut by_hand) = (Vec::new(), Vec::new());
            if direction == Direction::ToHost {
                slices.iter().for_each(|slice| slice.view().fill(0));
            }
            for round in 0..=ROUNDS {
                let begun = Instant::now();
                let mut done = Vec::with_capacity(copies as usize);
                for (slice, place) in slices.drain(..).zip(scattered(copies)) {
                    let to = DeviceAddr::Card(CardAddr::new(at + place * len));
                    let host = HostSlice::from((slice, via.clone()));
                    submit(&mut *queues[0], Operation::copy(direction, host, to), &mut done);
                }
                queues[0].flush();
                while done.len() < copies as usize {
                    queues[0].wait(&mut done, LONG);
                }
                let took = begun.elapsed().as_secs_f64();
                assert!(done.iter().all(|c| c.result.is_ok()));
                slices.extend(done.into_iter().map(|c| c.operation.into_slice().unwrap()));
                slices.sort_by_key(dmalane_dma::BufferSlice::offset);
                let hand = hand_written(&mut channel, &imported, &buffer, direction, len, copies);
                // The first of each makes memory present.
                if round > 0 {
                    ours.push(took);
                    by_hand.push(hand);
                }
            }
            let ((a, a_best), (b, b_best)) = (median(ours), median(by_hand));
            let rate = |s: f64| total as f64 / s / 1e9;
            println!(
                "{direction:?}{:>14} {copies:>7} {:>13.3} {:>13.3} {:>14.3} {:>8.3}",
                len,
                rate(a),
                rate(b),
                b / a,
                b_best / a_best
            );
        }
        // The data read back equals the data written.
        let mut bytes = vec![0; len as usize];
        for (k, slice) in slices.iter().enumerate() {
            slice.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().enumerate().all(|(i, b)| *b == byte(k * len as usize + i)), "copy {k} of {len} bytes");
        }
        drop((slices, rest, via, imported, buffer, channel));
        memory.free(table.segments()).unwrap();
    }
}

fn submit(queue: &mut DeviceQueue, mut operation: Operation, done: &mut Vec<dmalane_queue::Completion>) {
    loop {
        match queue.submit(operation) {
            Ok(_ticket) => return,
            Err(refused) => {
                assert_eq!(refused.reason, Refusal::Full);
                queue.wait(done, LONG);
                operation = refused.operation;
            }
        }
    }
}

/// The same regions in one command buffer.
fn hand_written(
    channel: &mut Channel<()>,
    host: &Arc<Buffer>,
    device: &Arc<Buffer>,
    direction: Direction,
    len: u64,
    copies: u64,
) -> f64 {
    let begun = Instant::now();
    let mut recording = channel.begin().unwrap();
    let regions: Vec<_> = scattered(copies)
        .zip(0..)
        .map(|(place, i)| match direction {
            Direction::FromHost => vk::BufferCopy { src_offset: i * len, dst_offset: place * len, size: len },
            Direction::ToHost => vk::BufferCopy { src_offset: place * len, dst_offset: i * len, size: len },
        })
        .collect();
    match direction {
        Direction::FromHost => channel.copy(&mut recording, host, device, &regions),
        Direction::ToHost => channel.copy(&mut recording, device, host, &regions),
    }
    channel.show_host(&recording);
    channel.submit(recording, None, ()).unwrap();
    let mut ended = false;
    while !ended {
        channel.wait(LONG).unwrap();
        channel.ended(|()| ended = true).unwrap();
    }
    begun.elapsed().as_secs_f64()
}

#[test]
#[ignore = "prints figures and takes a minute: run it with --ignored --nocapture on a quiet machine"]
fn measure_binds() {
    // Some drivers take 100 us a bind.
    const ROUNDS: usize = 3;
    let mut device = open(true);
    let Some(pages) = device.sparse_pages() else { return println!("SKIPPED: no sparse binding") };
    let (gpu, page) = (device.shared().clone(), pages.bytes());
    let mut memory = device.memory();
    let count = 4096u64;
    let table = memory.allocate(count * page, &Placement::Default).unwrap();
    let bo = Arc::new(Bo::new(1, SgIndex::from_table(&table).unwrap()));
    let per = |begun: Instant| begun.elapsed().as_secs_f64() * 1e6 / count as f64;
    // The driver's call alone, in batches of the same binds.
    let (buffer, _) = Granule::of(&gpu).unwrap().into_buffer();
    let timeline = Timeline::new(&gpu).unwrap();
    let chunk = device.buffer_at(table.segments().next().unwrap().addr).unwrap();
    let backing = chunk.memory().unwrap();
    let mut value = 0;
    println!("pages of {pages}; microseconds a bind, medians of {ROUNDS} (until the driver has done it)");
    for batch in [1u64, 16, 256, 4096] {
        let (mut binding, mut unbinding) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for bound in [true, false] {
                let begun = Instant::now();
                let places: Vec<u64> = scattered(count).collect();
                for (k, part) in places.chunks(batch as usize).enumerate() {
                    let binds: Vec<_> = part
                        .iter()
                        .enumerate()
                        .map(|(i, place)| SparseBind {
                            at: (k as u64 * batch + i as u64) * page,
                            len: page,
                            memory: bound.then_some((&**backing, place * page)),
                        })
                        .collect();
                    value += 1;
                    gpu.bind_sparse(&buffer, &binds, &timeline, value).unwrap();
                }
                assert!(timeline.wait(value, LONG).unwrap());
                if bound { binding.push(per(begun)) } else { unbinding.push(per(begun)) }
            }
        }
        println!("driver, batches of {batch:>4}: bind {:.3}, unbind {:.3}", median(binding).0, median(unbinding).0);
    }
    // Ours: planned by the VM, checked, and remembered.
    for batch in [1usize, 16, 256, 4096] {
        let (mut binding, mut unbinding) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let range = device.address_space().reserve(&table, count * page).unwrap();
            let at = |i: u64| dmalane_addr::DeviceVa::new(range.first().bits() + i * page);
            let whole: Vec<_> = (0..count)
                .zip(scattered(count))
                .map(|(i, place)| BindRequest::Bind {
                    va: at(i),
                    bo: bo.clone(),
                    offset: place * page,
                    len: page,
                    access: Access::RW,
                })
                .collect();
            let begun = Instant::now();
            whole.chunks(batch).for_each(|part| device.address_space().apply(part).unwrap());
            device.address_space().settle().unwrap();
            binding.push(per(begun));
            let begun = Instant::now();
            device.address_space().unbind(range).unwrap();
            unbinding.push(per(begun));
        }
        println!(
            "ours,   batches of {batch:>4}: bind {:.3}, unbind (all at once) {:.3}",
            median(binding).0,
            median(unbinding).0
        );
    }
}
