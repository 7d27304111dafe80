//! The Channel port, tickets, registered buffers, split policy and waiting; knows no device
