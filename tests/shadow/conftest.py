"""Pytest imports modules for their doctests, and this one would register the device in its process."""

collect_ignore = ["registered.py"]
