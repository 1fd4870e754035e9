"""The wire: collectives, their order, the engine that issues them. None is issued elsewhere."""
