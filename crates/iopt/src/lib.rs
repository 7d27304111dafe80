//! IO page tables: shared walkers, one file per format, table memory behind a trait
