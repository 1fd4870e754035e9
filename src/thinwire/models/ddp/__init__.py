"""The only package that uses DistributedDataParallel."""
