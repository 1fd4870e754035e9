"""Averaged models: their periods, the ranks that average, and the program that they use."""
