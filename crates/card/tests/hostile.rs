//! Random bytes against the card and against its driver.

use dmalane_card::fuzzing::{fuzz_driver, fuzz_ring};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_card_survives_its_driver(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        fuzz_ring(&bytes);
    }

    /// Mostly well-formed starts and descriptors, so that copies really happen.
    #[test]
    fn the_card_survives_a_plausible_driver(
        ops in prop::collection::vec((prop::sample::select(vec![2u8, 2, 3, 4, 6, 7, 0, 1]), any::<[u8; 9]>()), 1..60),
    ) {
        // The rings in the buffer that may be written, of 2^8 entries.
        let mut bytes = vec![5, 8, 0, 5 | 0x80, 4, 0];
        for (kind, rest) in ops {
            bytes.push(kind | rest[8] & 0x80);
            bytes.extend_from_slice(&rest[..if kind == 2 { 9 } else { 8 }]);
        }
        fuzz_ring(&bytes);
    }

    #[test]
    fn the_driver_survives_its_card(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        fuzz_driver(&bytes);
    }

    #[test]
    fn the_driver_survives_a_plausible_card(bytes in prop::collection::vec(0u8..0xf2, 60..400)) {
        fuzz_driver(&bytes);
    }
}
