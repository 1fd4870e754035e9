"""Models that a wire attaches to: DDP, FSDP2, and modules that each rank trains alone."""
