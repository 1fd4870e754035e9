"""Tests in frameworks, an extra: they are slow, and left out where their framework is not installed."""

import importlib.util
from pathlib import Path

import pytest

_NEEDS = {
    "src/thinwire/integrations/accelerate.py": "accelerate",
    "src/thinwire/integrations/fabric.py": "lightning",
    "src/thinwire/integrations/lightning.py": "lightning",
    "src/thinwire/integrations/torchft.py": "torchft",
    "src/thinwire/integrations/torchft_manager.py": "torchft",
    "src/thinwire/integrations/transformers.py": "transformers",
    "tests/integrations/lightning_rows.py": "lightning",
    "tests/integrations/test_accelerate.py": "accelerate",
    "tests/integrations/test_fabric.py": "lightning",
    "tests/integrations/test_lightning.py": "lightning",
    "tests/integrations/test_ray.py": "ray",
    "tests/integrations/test_torchft.py": "torchft",
    "tests/integrations/test_transformers.py": "transformers",
}
_MISSING = sorted({name for name in _NEEDS.values() if importlib.util.find_spec(name) is None})

collect_ignore = [path for path, name in _NEEDS.items() if name in _MISSING]

_KERNELS = ["src/thinwire/kernels/triton/kinds.py", "src/thinwire/kernels/triton/twoshot.py"]
_KERNELS += ["tests/kernels/triton/bits.py", "tests/kernels/triton/compiled.py"]
_KERNELS += ["tests/shadow/triton_kernels.py"]
if importlib.util.find_spec("triton") is None:
    collect_ignore += _KERNELS


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return the frameworks whose tests are left out."""
    if not _MISSING:
        return []
    return [f"left out: tests of {', '.join(_MISSING)}, which `make test-all` installs and runs"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the frameworks to `make test-all`."""
    folders = {
        Path(__file__).parent / folder for folder in ("tests/integrations", "src/thinwire/integrations")
    }
    for item in items:
        if folders.intersection(item.path.parents):
            item.add_marker(pytest.mark.slow)
