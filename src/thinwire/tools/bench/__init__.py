"""Benchmarks that compare programs on several links and world sizes."""
