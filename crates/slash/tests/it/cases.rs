//! The cases of SLASH's own driver tests (`driver/tests/test_slash_qdma.c`, commit 6a4cc11e), as a table: what our
//! model of the driver answers to each, or why only the kernel or the card can answer it.
//!
//! The table holds the model to what the driver promises: the tests of the queue are worth as much as the model is.

use std::collections::HashMap;

use dmalane_slash::model::{Answer, DriverModel, FileId, Version, words_of};
use dmalane_slash::{DDR, HBM, Request};
use libc::{EBADF, EINVAL, ENODEV, ENOENT, ENOTTY};

/// The expectation of a case.
enum Case {
    /// The model passes it.
    Passes(fn(&mut Rig)),
    /// It needs the card, or the kernel's own files.
    Needs(&'static str),
}

/// An open node of the model, and the descriptors of an imaginary process.
struct Rig {
    model: DriverModel,
    node: FileId,
    files: HashMap<i32, FileId>,
}

/// A queue pair that runs: its number and its file.
type Running = (u32, FileId);

const LEN: u64 = 4096;
const H2C: u32 = 1;
const C2H: u32 = 2;

impl Rig {
    fn new() -> Self {
        let model = DriverModel::new(Version::KNOWN).unwrap();
        let node = model.open_node().unwrap().0;
        Self { model, node, files: HashMap::new() }
    }

    /// Makes a call with the words of an argument, the first of which is its length as the caller says.
    fn call(&self, on: FileId, number: u32, words: &mut [u32]) -> Result<Answer, i32> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let answer = self.model.answer(on, number, &mut bytes, &|fd| self.files.get(&fd).copied());
        for (word, four) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes(four.try_into().unwrap());
        }
        answer
    }

    fn error(&self, on: FileId, request: Request, words: &[u32]) -> i32 {
        self.call(on, request.number(), &mut words.to_vec()).expect_err("refused")
    }

    fn add(&self, mode: u32, directions: u32) -> u32 {
        let mut words = [36, mode, directions, 0, 0, 0, 0, 0, 0];
        self.call(self.node, Request::PairAdd.number(), &mut words).unwrap();
        words[7]
    }

    fn op(&self, qid: u32, op: u32) -> Result<(), i32> {
        self.call(self.node, Request::PairOp.number(), &mut [12, qid, op]).map(drop)
    }

    fn file(&self, qid: u32) -> FileId {
        match self.call(self.node, Request::PairFile.number(), &mut [24, qid, 0, 0, 0, 0]) {
            Ok(Answer::File(id, _)) => id,
            other => panic!("{other:?}"),
        }
    }

    fn running(&self, directions: u32) -> Running {
        let qid = self.add(0, directions);
        self.op(qid, 0).unwrap();
        (qid, self.file(qid))
    }

    fn buffer(&mut self, on: FileId, len: u64) -> i32 {
        let [low, high] = words_of(len);
        match self.call(on, Request::BufferCreate.number(), &mut [24, 0, low, high, 0, 0]) {
            Ok(Answer::File(id, _)) => {
                let fd = 3 + self.files.len() as i32;
                self.files.insert(fd, id);
                fd
            }
            other => panic!("{other:?}"),
        }
    }

    fn transfer(&self, on: FileId, fd: i32, offset: u64, at: u64, len: u64, way: u32) -> Result<u64, i32> {
        let mut words = vec![88, 1, 0, way, fd as u32, 0];
        [offset, at, len].iter().for_each(|wide| words.extend(words_of(*wide)));
        words.resize(22, 0);
        match self.call(on, Request::Transfer.number(), &mut words)? {
            Answer::Number(n) => Ok(n),
            Answer::File(..) => panic!("a number"),
        }
    }

    /// Writes the card through one buffer, and reads it through another.
    fn round_trip(&mut self, at: u64, len: u64) {
        let (_, file) = self.running(3);
        let node = self.node;
        let (from, to) = (self.buffer(node, len.next_multiple_of(4096)), self.buffer(node, len.next_multiple_of(4096)));
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
        self.model.poke(DDR.0 + (1 << 30), &bytes);
        assert_eq!(self.transfer(file, from, 0, DDR.0 + (1 << 30), len, C2H), Ok(len));
        assert_eq!(self.transfer(file, from, 0, at, len, H2C), Ok(len));
        assert_eq!(self.transfer(file, to, 0, at, len, C2H), Ok(len));
        let mut there = vec![0; bytes.len()];
        self.model.peek(at, &mut there);
        assert!(there == bytes);
    }

    /// A call whose argument is `tail` words longer than the driver's has zeroes there afterwards.
    fn clears_the_tail(&self, request: Request, words: &[u32]) {
        let mut longer = words.to_vec();
        longer.resize(words.len() + 16, 0x5a5a_5a5a);
        longer[0] = longer.len() as u32 * 4;
        self.call(self.node, request.number(), &mut longer).unwrap();
        assert_eq!(longer[0] as usize, words.len() * 4, "the driver's own length");
        assert!(longer[words.len()..].iter().all(|w| *w == 0));
    }
}

fn lifecycle(rig: &mut Rig) {
    let (qid, _) = rig.running(3);
    rig.op(qid, 1).unwrap();
    rig.op(qid, 2).unwrap();
    assert_eq!(rig.model.pairs(), 0);
}

/// QPAIR_ADD with one word changed.
fn add_with(rig: &mut Rig, word: usize, value: u32) -> Result<(), i32> {
    let mut words = [36, 0, 3, 0, 0, 0, 0, 0, 0];
    words[word] = value;
    rig.call(rig.node, Request::PairAdd.number(), &mut words).map(drop)
}

const FILES: &str = "the kernel's own file: the model's are memfds";

/// All 49 cases, in their order.
fn cases() -> Vec<(&'static str, Case)> {
    use Case::{Needs, Passes};
    vec![
        (
            "query_info",
            Passes(|r| {
                let mut words = [0; 13];
                words[0] = 52;
                r.call(r.node, Request::Info.number(), &mut words).unwrap();
                assert_eq!(words[..5], [52, 0, 0, 0, 0]);
            }),
        ),
        ("device_node_identity_matches_sysfs_and_fd", Needs("the driver's sysfs")),
        ("qpair_lifecycle", Passes(lifecycle)),
        ("write_read_verify", Passes(|r| r.round_trip(DDR.0, LEN))),
        (
            "buf_create_zero_length_returns_einval",
            Passes(|r| {
                assert_eq!(r.error(r.node, Request::BufferCreate, &[24, 0, 0, 0, 0, 0]), EINVAL);
            }),
        ),
        (
            "buf_create_unaligned_length_returns_einval",
            Passes(|r| {
                let [low, high] = words_of(LEN + 1);
                assert_eq!(r.error(r.node, Request::BufferCreate, &[24, 0, low, high, 0, 0]), EINVAL);
            }),
        ),
        (
            "buf_create_reports_granule_and_hint",
            Passes(|r| {
                let mut words = [24, 0, words_of(LEN)[0], words_of(LEN)[1], 0, 0];
                r.call(r.node, Request::BufferCreate.number(), &mut words).unwrap();
                assert_eq!(words[4..], [4096, 2]);
            }),
        ),
        (
            "buf_create_via_qpair_fd",
            Passes(|r| {
                let (_, file) = r.running(3);
                let fd = r.buffer(file, LEN);
                assert_eq!(r.transfer(file, fd, 0, DDR.0, LEN, H2C), Ok(LEN));
            }),
        ),
        ("buf_fd_mapping_outlives_fd_close", Needs("the kernel's mapping of its own file")),
        ("qpair_add_invalid_dir_mask_zero", Passes(|r| assert_eq!(add_with(r, 2, 0), Err(EINVAL)))),
        ("qpair_add_invalid_dir_mask_high_bits", Passes(|r| assert_eq!(add_with(r, 2, 8), Err(EINVAL)))),
        (
            "qpair_lifecycle_streaming_with_completion",
            Passes(|r| {
                let qid = r.add(1, 7);
                [0, 1, 2].iter().for_each(|op| r.op(qid, *op).unwrap());
            }),
        ),
        ("qpair_add_invalid_mode_other", Passes(|r| assert_eq!(add_with(r, 1, 2), Err(EINVAL)))),
        ("qpair_add_h2c_ring_size_out_of_range", Passes(|r| assert_eq!(add_with(r, 4, 16), Err(EINVAL)))),
        ("qpair_add_c2h_ring_size_out_of_range", Passes(|r| assert_eq!(add_with(r, 5, 16), Err(EINVAL)))),
        ("qpair_add_cmpt_ring_size_out_of_range", Passes(|r| assert_eq!(add_with(r, 6, 16), Err(EINVAL)))),
        ("qpair_add_aperture_size_must_be_power_of_two", Passes(|r| assert_eq!(add_with(r, 8, 3), Err(EINVAL)))),
        ("qpair_add_keyhole_aperture", Passes(|r| assert_eq!(add_with(r, 8, 4096), Ok(())))),
        (
            "q_op_invalid_op",
            Passes(|r| {
                let qid = r.add(0, 3);
                assert_eq!(r.op(qid, 3), Err(EINVAL));
            }),
        ),
        ("q_op_unknown_qid", Passes(|r| assert_eq!(r.op(77, 0), Err(ENOENT)))),
        (
            "qpair_get_fd_invalid_flags",
            Passes(|r| {
                let qid = r.add(0, 3);
                assert_eq!(r.error(r.node, Request::PairFile, &[24, qid, 1, 0, 0, 0]), EINVAL);
            }),
        ),
        (
            "qpair_get_fd_unknown_qid",
            Passes(|r| {
                assert_eq!(r.error(r.node, Request::PairFile, &[24, 77, 0, 0, 0, 0]), ENOENT);
            }),
        ),
        (
            "io_read_on_h2c_only_returns_enodev",
            Passes(|r| {
                let (_, file) = r.running(1);
                let fd = r.buffer(file, LEN);
                assert_eq!(r.transfer(file, fd, 0, HBM.0, LEN, C2H), Err(ENODEV));
            }),
        ),
        (
            "io_write_on_c2h_only_returns_enodev",
            Passes(|r| {
                let (_, file) = r.running(2);
                let fd = r.buffer(file, LEN);
                assert_eq!(r.transfer(file, fd, 0, HBM.0, LEN, H2C), Err(ENODEV));
            }),
        ),
        (
            "io_zero_length_returns_einval",
            Passes(|r| {
                let (_, file) = r.running(3);
                let fd = r.buffer(file, LEN);
                assert_eq!(r.transfer(file, fd, 0, HBM.0, 0, H2C), Err(EINVAL));
            }),
        ),
        ("io_mmap_unsupported", Needs(FILES)),
        (
            "io_junk_ioctl_returns_enotty",
            Passes(|r| {
                let (_, file) = r.running(3);
                assert_eq!(r.call(file, u32::from(b'v') << 8 | 0xfe, &mut [4]).unwrap_err(), ENOTTY);
            }),
        ),
        ("io_lseek_unsupported", Needs(FILES)),
        ("io_read_write_unsupported", Needs(FILES)),
        (
            "io_multiple_fds_same_qpair",
            Passes(|r| {
                let (qid, file) = r.running(3);
                let (other, fd) = (r.file(qid), r.buffer(file, LEN));
                assert_eq!(r.transfer(file, fd, 0, HBM.0, LEN, H2C), Ok(LEN));
                assert_eq!(r.transfer(other, fd, 0, HBM.0, LEN, C2H), Ok(LEN));
            }),
        ),
        (
            "io_fd_outlives_qpair_del",
            Passes(|r| {
                let (qid, file) = r.running(3);
                let fd = r.buffer(file, LEN);
                r.op(qid, 2).unwrap();
                assert!(r.transfer(file, fd, 0, HBM.0, LEN, H2C).is_err());
            }),
        ),
        ("transfer_hbm", Passes(|r| r.round_trip(HBM.0, LEN))),
        ("transfer_ddr", Passes(|r| r.round_trip(DDR.0, LEN))),
        (
            "info_size_zero_returns_einval",
            Passes(|r| {
                assert_eq!(r.error(r.node, Request::Info, &[0; 13]), EINVAL);
            }),
        ),
        (
            "info_undersized_truncates_output",
            Passes(|r| {
                let mut words = [0x5a5a_5a5a; 13];
                words[0] = 4;
                r.call(r.node, Request::Info.number(), &mut words).unwrap();
                assert!(words[1..].iter().all(|w| *w == 0x5a5a_5a5a));
            }),
        ),
        ("info_oversized_struct_zeros_tail", Passes(|r| r.clears_the_tail(Request::Info, &[0; 13]))),
        (
            "qpair_add_size_below_input_min_returns_einval",
            Passes(|r| {
                assert_eq!(r.error(r.node, Request::PairAdd, &[24, 0, 3, 0, 0, 0, 0, 0, 0]), EINVAL);
            }),
        ),
        (
            "qpair_add_oversized_struct_zeros_tail",
            Passes(|r| {
                r.clears_the_tail(Request::PairAdd, &[0, 0, 3, 0, 0, 0, 0, 0, 0]);
            }),
        ),
        (
            "q_op_size_below_input_min_returns_einval",
            Passes(|r| {
                let qid = r.add(0, 3);
                assert_eq!(r.error(r.node, Request::PairOp, &[8, qid, 0]), EINVAL);
            }),
        ),
        (
            "q_op_oversized_struct_zeros_tail",
            Passes(|r| {
                let qid = r.add(0, 3);
                r.clears_the_tail(Request::PairOp, &[0, qid, 0]);
            }),
        ),
        (
            "qpair_get_fd_size_below_input_min_returns_einval",
            Passes(|r| {
                let qid = r.add(0, 3);
                assert_eq!(r.error(r.node, Request::PairFile, &[8, qid, 0, 0, 0, 0]), EINVAL);
            }),
        ),
        (
            "qpair_get_fd_oversized_struct_zeros_tail",
            Passes(|r| {
                let qid = r.add(0, 3);
                r.clears_the_tail(Request::PairFile, &[0, qid, 0, 0, 0, 0]);
            }),
        ),
        ("partial_4k_write_read_verify", Passes(|r| r.round_trip(HBM.0, 1234))),
        ("multipage_4k_write_read_verify", Passes(|r| r.round_trip(HBM.0, 5 * 4096))),
        (
            "transfer_size_below_input_min_returns_einval",
            Passes(|r| {
                let (_, file) = r.running(3);
                let mut words = [0; 22];
                words[0] = 4;
                assert_eq!(r.error(file, Request::Transfer, &words), EINVAL);
            }),
        ),
        (
            "transfer_invalid_buf_fd_returns_einval",
            Passes(|r| {
                let (_, file) = r.running(3);
                r.files.insert(90, file);
                assert_eq!(r.transfer(file, 90, 0, HBM.0, LEN, H2C), Err(EINVAL), "a file that is no buffer");
            }),
        ),
        (
            "transfer_bad_fd_returns_ebadf",
            Passes(|r| {
                let (_, file) = r.running(3);
                assert_eq!(r.transfer(file, 99, 0, HBM.0, LEN, H2C), Err(EBADF));
            }),
        ),
        (
            "transfer_wrong_direction_returns_enodev",
            Passes(|r| {
                let (_, file) = r.running(1);
                let fd = r.buffer(file, LEN);
                assert_eq!(r.transfer(file, fd, 0, HBM.0, LEN, C2H), Err(ENODEV));
            }),
        ),
        (
            "transfer_out_of_range_returns_einval",
            Passes(|r| {
                let (_, file) = r.running(3);
                let fd = r.buffer(file, LEN);
                for (offset, len) in [(LEN, LEN), (0, LEN + 1), (1, 1), (u64::MAX - 4095, LEN)] {
                    assert_eq!(r.transfer(file, fd, offset, HBM.0, len, H2C), Err(EINVAL), "{len} at {offset}");
                }
            }),
        ),
    ]
}

#[test]
fn the_model_passes_the_drivers_own_cases() {
    let (mut passed, mut needs) = (0, Vec::new());
    for (name, case) in cases() {
        match case {
            Case::Passes(test) => {
                println!("{name}");
                test(&mut Rig::new());
                passed += 1;
            }
            Case::Needs(what) => needs.push(format!("{name}: {what}")),
        }
    }
    println!("needs the card or its module:\n{}", needs.join("\n"));
    assert_eq!((passed, needs.len()), (44, 5));
}
