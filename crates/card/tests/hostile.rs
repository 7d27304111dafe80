//! Random bytes against the card and against its driver.

use dmalane_card::fuzzing::{fuzz_driver, fuzz_ring};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_card_survives_its_driver(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz_ring(&bytes);
    }

    /// Mostly well-formed starts, descriptors and page tables, so that copies really happen.
    #[test]
    fn the_card_survives_a_plausible_driver(
        ops in prop::collection::vec((prop::sample::select(b"2222223344677015".to_vec()), any::<[u8; 8]>()), 1..120),
    ) {
        // The rings of both channels in the buffer that may be written, of 2^8 entries; an MMU whose root is its own only
        // table.
        let mut bytes = vec![5, 8, 0, 5 | 0x80, 8, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0];
        for (kind, mut rest) in ops {
            if kind == b'2' {
                rest[1] &= 0x1f; // no reserved flag
            }
            let operands = [6, 34, 8, 1, 1, 2, 10, 2][usize::from(kind & 7)];
            bytes.push(kind & 7 | rest[7] & 0x80);
            bytes.extend(rest.iter().cycle().take(operands));
        }
        fuzz_ring(&bytes);
    }

    #[test]
    fn the_driver_survives_its_card(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        fuzz_driver(&bytes);
    }

    #[test]
    fn the_driver_survives_a_plausible_card(bytes in prop::collection::vec(0u8..0xf9, 60..400)) {
        fuzz_driver(&bytes);
    }
}
