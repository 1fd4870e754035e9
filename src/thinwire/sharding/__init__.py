"""Each rank keeps optimizer state for some parameters only, and sends those to the others (ZeRO, stage 1)."""
