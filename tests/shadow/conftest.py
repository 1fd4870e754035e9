"""Pytest imports modules for their doctests, and these would register the device in its process."""

collect_ignore = ["planted.py", "registered.py"]
