"""The parts of scripts/soak: jobs, daemons, what the kernel says of them, and what grows."""
