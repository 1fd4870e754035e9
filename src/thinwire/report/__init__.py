"""One self-contained HTML page of a benchmark, or of a training log."""
