"""The wire: collectives, their order, the engine that issues them. All use of torch.distributed is here."""
