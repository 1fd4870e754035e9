"""Averages models instead of gradients: when, over whom, and what with."""
