"""The way from a collective to torch.distributed: process groups, messages, the store, and failures."""
