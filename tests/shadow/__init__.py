"""A device of our own that finds races: see docs/accelerators.md."""
