"""Slow networks emulated on one machine. Every host is a network namespace behind a throttled link."""
