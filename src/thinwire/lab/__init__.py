"""Emulated slow networks on one machine: every host is a network namespace behind a throttled link."""
