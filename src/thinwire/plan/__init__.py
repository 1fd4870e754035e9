"""The planner: what a training step will cost with each program on a network, before training."""
