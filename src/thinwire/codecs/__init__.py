"""Codecs: pure tensor functions that encode gradients for the wire and decode them."""
