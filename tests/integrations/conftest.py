"""Ranks start with the frameworks loaded: each takes seconds to import, and every rank would do so."""

from pathlib import Path

import pytest

from tests import harness

harness.preload(
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "lightning.pytorch",
    "tests.integrations.frameworks",
    "benchmarks.live_job",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow more time than elsewhere: a framework on a busy machine takes many times what it takes alone."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
