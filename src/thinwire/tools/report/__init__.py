"""Self-contained HTML pages of a benchmark or a training log."""
