"""The self-test of an accelerator: `torchrun ... -m thinwire doctor --accelerator`."""
