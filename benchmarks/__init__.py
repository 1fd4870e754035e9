"""Side by side against torch, in one interleaved run each."""
