"""Averaged models: when they are averaged, among which ranks, and by which program."""
