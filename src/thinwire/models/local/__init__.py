"""Models without DDP, one replica per rank, each of which trains on its own."""
