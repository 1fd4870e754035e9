"""Codecs: pure tensor functions from gradients to what travels, and back."""
