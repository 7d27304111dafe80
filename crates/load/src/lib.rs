//! The pipeline from file to device: read, map, transfer and bind overlap, with a clock on each stage
