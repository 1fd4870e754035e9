"""The planner, which predicts the cost of a training step with each program on a network."""
