//! Memory that CPU and device share: heaps, buffers, views, the software host and the two ports
