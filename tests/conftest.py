"""Every test must leave the process as it found it."""

import gc
import multiprocessing
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests import harness

# Speed is shown by benchmarks, not by tests, and a busy machine fails none.
settings.register_profile(
    "thinwire", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("thinwire")


def pytest_collection_finish() -> None:
    """Exempt torch's modules from garbage collection: looking at them takes 150 ms each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _ranks_end() -> Iterator[None]:
    """End the ranks that were kept warm for further tests."""
    yield
    harness.end_warm_ranks()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    torch.manual_seed(0)
    threads_before = set(threading.enumerate())
    yield
    left = set(multiprocessing.active_children()) - set(harness.warm_processes())
    assert not left, f"the test left processes behind: {left}"
    leaked = [thread.name for thread in threading.enumerate() if thread not in threads_before]
    assert not leaked, f"the test left threads behind: {leaked}"
    assert not dist.is_initialized(), "the test left a process group behind"


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one, which needs no network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
