//! Operations, and those that no queue takes.

use dmalane_addr::{Access, CardAddr, DeviceVa, FileOffset};
use dmalane_queue::{
    CacheHint, Capabilities, DeviceAddr, Direction, HostSlice, Limits, Operation, QueueAddr, Refusal, Registered, Shape,
};

use crate::fakes::{Bus, pages, slice};

fn at(bits: u64) -> DeviceAddr {
    DeviceAddr::Card(CardAddr::new(bits))
}

fn shape(row: u32, rows: u32, host_pitch: u64, device_pitch: u64) -> Shape {
    Shape { row: row.into(), rows, host_pitch, device_pitch }
}

#[test]
fn a_slice_needs_a_registration_of_this_bus_that_permits_it() {
    let (bus, another) = (Bus::default(), Bus::default());
    let buffer = || {
        let buf = pages(1);
        let via = Registered::new(&bus, &buf, Access::READ).unwrap();
        HostSlice::from((buf.into_slice(), via))
    };
    let host = buffer();
    assert_eq!(host.check(&bus, Access::READ), Ok(()));
    assert_eq!(host.check(&bus, Access::WRITE), Err(Refusal::NotPermitted), "a read-only registration");
    assert_eq!(host.check(&bus, Access::RW), Err(Refusal::NotPermitted));
    assert_eq!(host.check(&another, Access::READ), Err(Refusal::NotRegistered), "of another bus");
    assert_eq!(host.iova().map(|span| span.len()), Some(4096));
    assert_eq!(HostSlice::from(slice(64)).check(&bus, Access::READ), Err(Refusal::NotRegistered));
    let foreign = HostSlice { slice: slice(64), via: buffer().via };
    assert_eq!(foreign.check(&bus, Access::READ), Err(Refusal::NotRegistered), "of other memory");
    assert_eq!(foreign.iova(), None);

    // Reads of the device, and comparisons, only read host memory.
    assert_eq!(Operation::write(buffer(), at(0)).check_registered(&bus), Ok(()));
    assert_eq!(Operation::compare(buffer(), at(0)).check_registered(&bus), Ok(()));
    assert_eq!(Operation::read(buffer(), at(0)).check_registered(&bus), Err(Refusal::NotPermitted));
    let host = vec![buffer(), HostSlice::from(slice(64))];
    let gather = Operation::gather(Direction::FromHost, host, vec![(at(0), 4160)]);
    assert_eq!(gather.check_registered(&bus), Err(Refusal::NotRegistered), "one of the list");
    let host = vec![buffer(), buffer()];
    let gather = Operation::gather(Direction::ToHost, host, vec![(at(0), 8192)]);
    assert_eq!(gather.check_registered(&bus), Err(Refusal::NotPermitted));
    assert_eq!(Operation::fill(at(0), 8, 0).check_registered(&bus), Ok(()), "no host memory");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let top = u64::MAX - 63;
    let gather = |device: Vec<(DeviceAddr, u64)>| {
        Operation::gather(Direction::FromHost, vec![slice(40).into(), slice(24).into()], device)
    };
    let good = [
        Operation::read(slice(64), at(top)),
        Operation::compare(slice(64), at(top)),
        Operation::within(at(top), at(0), 64),
        Operation::within(at(0), at(top), 64),
        Operation::fill(at(top), 64, 0),
        gather(vec![(at(top), 64)]),
        gather(vec![(at(0), 1), (at(top), 63)]),
        Operation::fence(),
        // Rows of 16 at 48 and 24: the host's extent is that of the slice.
        Operation::write(slice(112), at(u64::MAX - 63)).shaped(shape(16, 3, 48, 24)),
        Operation::within(at(0), at(u64::MAX - 63), 48).shaped(shape(16, 3, 48, 24)),
        Operation::fill(at(u64::MAX - 63), 48, 0).shaped(shape(16, 3, 0, 24)),
        Operation::write(slice(16), at(0)).shaped(shape(16, 3, 0, 0)),
    ];
    for operation in good {
        assert_eq!(operation.check(), Ok(()), "{operation:?}");
    }
    let bad = [
        (Operation::read(slice(0), at(0)), Refusal::Empty),
        (Operation::within(at(0), at(0), 0), Refusal::Empty),
        (Operation::fill(at(0), 0, 0), Refusal::Empty),
        (Operation::read(slice(64), at(top + 1)), Refusal::PastTheTop),
        (Operation::within(at(top + 1), at(0), 64), Refusal::PastTheTop),
        (Operation::within(at(0), at(top + 1), 64), Refusal::PastTheTop),
        (Operation::fill(at(top + 1), 64, 0), Refusal::PastTheTop),
        (gather(vec![(at(0), 63)]), Refusal::Mismatch),
        (gather(vec![(at(0), 65)]), Refusal::Mismatch),
        (gather(vec![(at(0), 64), (at(0), 0)]), Refusal::Empty),
        (gather(vec![(at(top + 1), 64)]), Refusal::PastTheTop),
        (gather(vec![(at(0), 1 << 63), (at(0), 1 << 63)]), Refusal::Mismatch),
        (Operation::gather(Direction::ToHost, vec![], vec![]), Refusal::Empty),
        (Operation::gather(Direction::ToHost, vec![slice(0).into()], vec![]), Refusal::Empty),
        (gather(vec![(at(0), 64)]).shaped(shape(64, 1, 64, 64)), Refusal::Mismatch),
        (Operation::fence().shaped(shape(64, 1, 64, 64)), Refusal::Mismatch),
        (Operation::write(slice(111), at(0)).shaped(shape(16, 3, 48, 24)), Refusal::Mismatch),
        (Operation::write(slice(113), at(0)).shaped(shape(16, 3, 48, 24)), Refusal::Mismatch),
        (Operation::write(slice(112), at(top + 1)).shaped(shape(16, 3, 48, 24)), Refusal::PastTheTop),
        (Operation::write(slice(112), at(0)).shaped(shape(0, 3, 48, 24)), Refusal::Empty),
        (Operation::write(slice(112), at(0)).shaped(shape(16, 0, 48, 24)), Refusal::Empty),
        (Operation::within(at(0), at(0), 47).shaped(shape(16, 3, 48, 24)), Refusal::Mismatch),
        (Operation::within(at(top - 47), at(0), 48).shaped(shape(16, 3, 48, 24)), Refusal::PastTheTop),
        (Operation::fill(at(0), 49, 0).shaped(shape(16, 3, 48, 24)), Refusal::Mismatch),
        (Operation::fill(at(0), 48, 0).shaped(shape(16, 3, 0, u64::MAX / 2 + 1)), Refusal::PastTheTop),
    ];
    for (operation, reason) in bad {
        assert_eq!(operation.check(), Err(reason), "{operation:?}");
    }
}

#[test]
fn a_shape_reaches_to_the_end_of_its_last_row() {
    let extent = |row: u64, rows: u32, pitch: u64| Shape { row, rows, host_pitch: 0, device_pitch: 0 }.extent(pitch);
    assert_eq!((extent(16, 3, 48), extent(16, 1, 48), extent(16, 3, 0)), (Some(112), Some(16), Some(16)));
    assert_eq!((extent(0, 3, 48), extent(16, 0, 48)), (None, None), "no row");
    assert_eq!((extent(1, 2, u64::MAX - 1), extent(2, 2, u64::MAX - 1)), (Some(u64::MAX), None));
    assert_eq!(extent(1, 3, u64::MAX / 2 + 1), None);
    let bytes = |row: u64, rows: u32| Shape { row, rows, host_pitch: 0, device_pitch: 0 }.bytes();
    assert_eq!((bytes(16, 3), bytes(1 << 63, 1), bytes(1 << 63, 2)), (Some(48), Some(1 << 63), None));
}

#[test]
fn what_a_queue_cannot_do_is_refused_by_name() {
    let limits = Limits { capacity: 1, max_len: 64, max_parts: usize::MAX };
    let needs = [
        (Operation::read(slice(64), at(0)), Capabilities::TO_HOST),
        (Operation::write(slice(64), at(0)), Capabilities::FROM_HOST),
        (Operation::compare(slice(64), at(0)), Capabilities::COMPARE),
        (Operation::within(at(0), at(64), 64), Capabilities::WITHIN),
        (Operation::fill(at(0), 64, 0), Capabilities::FILL),
        (Operation::fence(), Capabilities::FENCE),
        (
            Operation::gather(Direction::ToHost, vec![slice(64).into()], vec![(at(0), 64)]),
            Capabilities::GATHER | Capabilities::TO_HOST,
        ),
        (Operation::fill(at(0), 64, 0).shaped(shape(64, 1, 0, 64)), Capabilities::FILL | Capabilities::SHAPE),
    ];
    for (operation, needed) in needs {
        assert_eq!(operation.needs(), needed, "{operation:?}");
        assert_eq!(operation.admit(Capabilities::all(), limits), Ok(()));
        assert_eq!(operation.admit(Capabilities::empty(), limits), Err(Refusal::Unsupported(needed)));
        for one in needed.iter() {
            assert_eq!(operation.admit(Capabilities::all() - one, limits), Err(Refusal::Unsupported(one)));
        }
    }
    let long = Operation::read(slice(65), at(0)).admit(Capabilities::all(), limits);
    assert_eq!(long, Err(Refusal::TooLong { len: 65, max: 64 }));
    let empty = Operation::read(slice(0), at(0)).admit(Capabilities::all(), limits);
    assert_eq!(empty, Err(Refusal::Empty));
}

#[test]
fn lists_of_too_many_parts_are_refused() {
    let list = |host: &[usize], device: &[u64]| {
        let device =
            device.iter().scan(0, |end, len| Some((at(std::mem::replace(end, *end + 2 * len)), *len))).collect();
        Operation::gather(Direction::ToHost, host.iter().map(|len| slice(*len).into()).collect(), device)
    };
    for (host, device, parts) in [
        (&[64][..], &[64][..], 1),
        (&[30, 34], &[64], 2),
        (&[64], &[1, 2, 61], 3),
        (&[10, 20, 34], &[10, 54], 3),
        (&[10, 20, 34], &[11, 20, 33], 5),
    ] {
        let operation = list(host, device);
        let admit = |max_parts| operation.admit(Capabilities::all(), Limits { capacity: 1, max_len: 64, max_parts });
        assert_eq!(admit(parts), Ok(()), "{host:?} {device:?}");
        assert_eq!(admit(parts - 1), Err(Refusal::TooManyParts { parts, max: parts - 1 }), "{host:?} {device:?}");
    }
}

/// Compared with sets of the bytes of both sides; of rows with different pitches, of all from the first to the last.
#[test]
fn copies_within_the_device_do_not_overlap() {
    let bytes = |from: u64, shape: &Shape, pitch: u64, all: bool| -> std::collections::BTreeSet<u64> {
        let rows = (0..u64::from(shape.rows)).flat_map(|r| (0..shape.row).map(move |i| from + r * pitch + i));
        match all {
            true => (from..from + shape.extent(pitch).unwrap()).collect(),
            false => rows.collect(),
        }
    };
    let refused = |operation: Operation| match operation.check() {
        Ok(()) => false,
        Err(Refusal::Overlap) => true,
        Err(other) => panic!("{other}"),
    };
    for (from, len) in (0..40).flat_map(|from| (1..24).map(move |len| (from, len))) {
        assert_eq!(refused(Operation::within(at(from), at(20), len)), from.abs_diff(20) < len, "{from} {len}");
    }
    for (row, rows) in (1..5).flat_map(|row| (1..4).map(move |rows| (row, rows))) {
        for (host, device) in (0..9).flat_map(|host| (0..9).map(move |device| (host, device))) {
            let shape = shape(row, rows, host, device);
            for from in 0..60 {
                let all = host != device;
                let both = bytes(from, &shape, host, all).intersection(&bytes(30, &shape, device, all)).count();
                let operation = Operation::within(at(from), at(30), shape.bytes().unwrap()).shaped(shape);
                assert_eq!(refused(operation), both > 0, "{from} {shape:?}");
            }
        }
    }
    // Of different spaces nothing is known.
    let va = |at| DeviceAddr::Va(DeviceVa::new(at));
    assert!(!refused(Operation::within(at(0), va(0), 8)) && refused(Operation::within(va(0), va(7), 8)));
    let last = u64::MAX - 7;
    assert!(!refused(Operation::within(at(0), at(last), 8)) && refused(Operation::within(at(last), at(last), 8)));
}

#[test]
fn memory_comes_back_as_it_was_given() {
    let hosts = || vec![HostSlice::from(slice(40)), HostSlice::from(slice(24))];
    let gather = Operation::gather(Direction::ToHost, hosts(), vec![(at(0), 64)]);
    assert_eq!((gather.bytes(), gather.hosts().len(), gather.direction()), (64, 2, Some(Direction::ToHost)));
    assert_eq!(gather.into_host().iter().map(|h| h.slice.len()).collect::<Vec<_>>(), [40, 24]);
    let compare = Operation::compare(slice(64), at(0)).hint(CacheHint::Cold);
    assert_eq!((compare.bytes(), compare.direction(), compare.cache), (64, None, CacheHint::Cold));
    assert_eq!(compare.into_slice().map(|s| s.len()), Some(64));
    assert_eq!(Operation::write(slice(64), at(0)).into_host().len(), 1);
    assert!(Operation::fill(at(0), 9, 0).into_slice().is_none());
    assert!(Operation::<DeviceAddr>::gather(Direction::ToHost, hosts(), vec![]).into_slice().is_none());
    assert_eq!(Operation::within(at(0), at(0), 7).bytes(), 7);
    assert_eq!(Operation::fill(at(0), 9, 0).bytes(), 9);
    assert_eq!(Operation::<DeviceAddr>::fence().bytes(), 0);
    assert!(Operation::fill(at(0), 9, 0).into_host().is_empty() && Operation::fill(at(0), 9, 0).hosts().is_empty());
    assert_eq!(Operation::fill(at(0), 48, 0).shaped(shape(16, 3, 0, 24)).bytes(), 48);
}

#[test]
fn addresses_end_at_the_top_of_their_space() {
    assert_eq!(at(u64::MAX - 5).advance(5), Some(at(u64::MAX)));
    assert_eq!(at(u64::MAX - 5).advance(6), None);
    let va = DeviceAddr::Va(DeviceVa::new(7));
    assert_eq!((va.advance(3), va.bits()), (Some(DeviceAddr::Va(DeviceVa::new(10))), 7));
    assert_eq!((va.card_addr(), at(9).card_addr(), at(9).bits()), (None, Some(CardAddr::new(9)), 9));
    let file = FileOffset::new(11);
    assert_eq!((QueueAddr::bits(file), file.card_addr(), file.advance(u64::MAX)), (11, None, None));
    assert_eq!(file.advance(4), Some(FileOffset::new(15)));
    assert_eq!(DeviceAddr::from(CardAddr::new(3)), at(3));
}
