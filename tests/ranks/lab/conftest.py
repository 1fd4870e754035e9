"""These tests build real networks; where the machine forbids that, the skip says what it said."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire import UnavailableError
from thinwire.tools.lab.namespaces import way_in


@pytest.fixture(scope="session", autouse=True)
def _lab_is_possible() -> None:
    try:
        way_in()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _one_at_a_time() -> Iterator[None]:
    """Wait for other workers: `clean` ends any lab on the machine whose owner is gone."""
    with Path(tempfile.gettempdir(), "thinwire-lab-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
