"""One training step, from its first bucket to its commit. Knows no DDP and no FSDP."""
