"""Saved state, with rank keys, validation, and merging for another number of ranks."""
