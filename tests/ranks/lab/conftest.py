"""These tests build real networks; where the machine forbids that, the skip says what it said."""

import pytest

from thinwire import UnavailableError
from thinwire.tools.lab.namespaces import way_in


@pytest.fixture(scope="session", autouse=True)
def _lab_is_possible() -> None:
    try:
        way_in()
    except UnavailableError as error:
        pytest.skip(str(error))
