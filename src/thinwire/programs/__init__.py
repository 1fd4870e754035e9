"""Programs: what happens to one bucket of gradients, start to finish."""
