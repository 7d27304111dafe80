//! The program that reads device addresses on the GPU: `shader.spvasm` in machine form, and its parameters.
//!
//! It copies bytes to a place that is a multiple of four. Every GPU with device addresses runs it: it calculates with
//! 32 bits only.

/// Bytes of one run at most. Every GPU runs 65 535 groups of 64 words.
pub(crate) const MOST: u64 = 4 << 20;
/// Bytes of its parameters.
pub(crate) const PARAMETERS: usize = 32;

/// Invocations of a group.
const GROUP: u32 = 64;

/// The parameters of a run that copies `len` bytes, at most [`MOST`], and how many groups it has. It reads the words in
/// which bytes from `from` on lie, and writes whole words from `to` on, which is a multiple of four.
pub(crate) fn parameters(from: u64, to: u64, len: u64) -> ([u8; PARAMETERS], u32) {
    let (within, len) = (from % 4, len.min(MOST));
    let (words, last) = (len.div_ceil(4) as u32, (within + len).div_ceil(4) as u32 - 1);
    let mut parameters = [0; PARAMETERS];
    parameters[..8].copy_from_slice(&(from - within).to_le_bytes());
    parameters[8..16].copy_from_slice(&to.to_le_bytes());
    for (at, value) in [(16, words), (20, last), (24, within as u32 * 8)] {
        parameters[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    (parameters, words.div_ceil(GROUP))
}

/// `spirv-as --target-env spv1.3 shader.spvasm`.
#[rustfmt::skip]
pub(crate) const WORDS: [u32; 322] = [
    0x07230203, 0x00010300, 0x00070000, 0x00000036, 0x00000000, 0x00020011, 0x00000001, 0x00020011, 0x000014e3,
    0x0009000a, 0x5f565053, 0x5f52484b, 0x73796870, 0x6c616369, 0x6f74735f, 0x65676172, 0x6675625f, 0x00726566,
    0x0003000e, 0x000014e4, 0x00000001, 0x0006000f, 0x00000005, 0x00000001, 0x6e69616d, 0x00000000, 0x00000002,
    0x00060010, 0x00000001, 0x00000011, 0x00000040, 0x00000001, 0x00000001, 0x00040047, 0x00000002, 0x0000000b,
    0x0000001c, 0x00040047, 0x00000003, 0x00000006, 0x00000004, 0x00030047, 0x00000004, 0x00000002, 0x00050048,
    0x00000004, 0x00000000, 0x00000023, 0x00000000, 0x00030047, 0x00000005, 0x00000002, 0x00050048, 0x00000005,
    0x00000000, 0x00000023, 0x00000000, 0x00050048, 0x00000005, 0x00000001, 0x00000023, 0x00000008, 0x00050048,
    0x00000005, 0x00000002, 0x00000023, 0x00000010, 0x00050048, 0x00000005, 0x00000003, 0x00000023, 0x00000014,
    0x00050048, 0x00000005, 0x00000004, 0x00000023, 0x00000018, 0x00020013, 0x00000006, 0x00030021, 0x00000007,
    0x00000006, 0x00020014, 0x00000008, 0x00040015, 0x00000009, 0x00000020, 0x00000000, 0x00040017, 0x0000000a,
    0x00000009, 0x00000003, 0x00040020, 0x0000000b, 0x00000001, 0x0000000a, 0x00040020, 0x0000000c, 0x00000001,
    0x00000009, 0x0003001d, 0x00000003, 0x00000009, 0x0003001e, 0x00000004, 0x00000003, 0x00040020, 0x0000000d,
    0x000014e5, 0x00000004, 0x00040020, 0x0000000e, 0x000014e5, 0x00000009, 0x0007001e, 0x00000005, 0x0000000d,
    0x0000000d, 0x00000009, 0x00000009, 0x00000009, 0x00040020, 0x0000000f, 0x00000009, 0x00000005, 0x00040020,
    0x00000010, 0x00000009, 0x0000000d, 0x00040020, 0x00000011, 0x00000009, 0x00000009, 0x0004002b, 0x00000009,
    0x00000012, 0x00000000, 0x0004002b, 0x00000009, 0x00000013, 0x00000001, 0x0004002b, 0x00000009, 0x00000014,
    0x00000002, 0x0004002b, 0x00000009, 0x00000015, 0x00000003, 0x0004002b, 0x00000009, 0x00000016, 0x00000004,
    0x0004002b, 0x00000009, 0x00000017, 0x0000001f, 0x0004003b, 0x0000000b, 0x00000002, 0x00000001, 0x0004003b,
    0x0000000f, 0x00000018, 0x00000009, 0x00050036, 0x00000006, 0x00000001, 0x00000000, 0x00000007, 0x000200f8,
    0x00000019, 0x00050041, 0x0000000c, 0x0000001a, 0x00000002, 0x00000012, 0x0004003d, 0x00000009, 0x0000001b,
    0x0000001a, 0x00050041, 0x00000011, 0x0000001c, 0x00000018, 0x00000014, 0x0004003d, 0x00000009, 0x0000001d,
    0x0000001c, 0x000500b0, 0x00000008, 0x0000001e, 0x0000001b, 0x0000001d, 0x000300f7, 0x0000001f, 0x00000000,
    0x000400fa, 0x0000001e, 0x00000020, 0x0000001f, 0x000200f8, 0x00000020, 0x00050041, 0x00000010, 0x00000021,
    0x00000018, 0x00000012, 0x0004003d, 0x0000000d, 0x00000022, 0x00000021, 0x00050041, 0x00000010, 0x00000023,
    0x00000018, 0x00000013, 0x0004003d, 0x0000000d, 0x00000024, 0x00000023, 0x00050041, 0x00000011, 0x00000025,
    0x00000018, 0x00000015, 0x0004003d, 0x00000009, 0x00000026, 0x00000025, 0x00050041, 0x00000011, 0x00000027,
    0x00000018, 0x00000016, 0x0004003d, 0x00000009, 0x00000028, 0x00000027, 0x00060041, 0x0000000e, 0x00000029,
    0x00000022, 0x00000012, 0x0000001b, 0x0006003d, 0x00000009, 0x0000002a, 0x00000029, 0x00000002, 0x00000004,
    0x00050080, 0x00000009, 0x0000002b, 0x0000001b, 0x00000013, 0x000500ac, 0x00000008, 0x0000002c, 0x0000002b,
    0x00000026, 0x000600a9, 0x00000009, 0x0000002d, 0x0000002c, 0x00000026, 0x0000002b, 0x00060041, 0x0000000e,
    0x0000002e, 0x00000022, 0x00000012, 0x0000002d, 0x0006003d, 0x00000009, 0x0000002f, 0x0000002e, 0x00000002,
    0x00000004, 0x000500c2, 0x00000009, 0x00000030, 0x0000002a, 0x00000028, 0x000500c4, 0x00000009, 0x00000031,
    0x0000002f, 0x00000013, 0x00050082, 0x00000009, 0x00000032, 0x00000017, 0x00000028, 0x000500c4, 0x00000009,
    0x00000033, 0x00000031, 0x00000032, 0x000500c5, 0x00000009, 0x00000034, 0x00000030, 0x00000033, 0x00060041,
    0x0000000e, 0x00000035, 0x00000024, 0x00000012, 0x0000001b, 0x0005003e, 0x00000035, 0x00000034, 0x00000002,
    0x00000004, 0x000200f9, 0x0000001f, 0x000200f8, 0x0000001f, 0x000100fd, 0x00010038,
];

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_words_are_those_of_the_text() {
        let text = concat!(env!("CARGO_MANIFEST_DIR"), "/src/shader.spvasm");
        let made = match Command::new("spirv-as").args(["--target-env", "spv1.3", "-o", "-", text]).output() {
            Ok(made) => made,
            Err(e) => return println!("SKIPPED: spirv-as (Debian: spirv-tools): {e}"),
        };
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let words: Vec<u32> = made.stdout.chunks(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect();
        // The third word says which version of the assembler made it.
        assert!(words[..2] == WORDS[..2] && words[3..] == WORDS[3..], "{words:#010x?}");
    }

    #[test]
    fn parameters_name_the_words_that_the_bytes_lie_in() {
        for (from, len, words, last, groups) in
            [(0x1000, 4, 1, 0, 1), (0x1001, 4, 1, 1, 1), (0x1003, 1, 1, 0, 1), (0x1002, 257, 65, 64, 2)]
        {
            let (bytes, count) = parameters(from, 0x2000, len);
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let got = (word(0), word(8), word(16), word(20), word(24), count);
            assert_eq!(got, (0x1000, 0x2000, words, last, (from as u32 % 4) * 8, groups), "{len} bytes at {from:#x}");
        }
    }
}
