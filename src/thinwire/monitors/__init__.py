"""Checks during training: audits of compression, comparison of replicas."""
