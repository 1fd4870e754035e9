"""Every test must leave the process as it found it."""

import multiprocessing
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

# Speed is shown by benchmarks, not by tests; the examples are what fits into ten minutes for all.
settings.register_profile("thinwire", deadline=None, max_examples=50)
settings.load_profile("thinwire")


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    torch.manual_seed(0)
    threads_before = set(threading.enumerate())
    yield
    assert not multiprocessing.active_children(), "the test left processes behind"
    leaked = [thread.name for thread in threading.enumerate() if thread not in threads_before]
    assert not leaked, f"the test left threads behind: {leaked}"
    assert not dist.is_initialized(), "the test left a process group behind"
