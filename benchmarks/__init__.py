"""Benchmarks that compare thinwire with torch in interleaved runs."""
