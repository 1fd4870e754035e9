"""A cache folder of the tests' own: builds of one run share it, and the user's stays as it is."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPOPAGES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
