"""Two-shots of whole buckets through Triton's kernels."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton, which the dev extra installs on Linux with x86-64")


@pytest.mark.parametrize(
    ("cases", "count"), [("quick", 9), pytest.param("all", 54, marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_whole_exchanges_have_the_bits_of_the_cpu(cases: str, count: int) -> None:
    command = [sys.executable, "-m", "tests.programs.triton_exchanges", cases]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, tuple[int, int]] = json.loads(output)
    assert len(found) == count
    assert all(compared > 1000 for compared, _ in found.values())
    assert {case: differing for case, (_, differing) in found.items() if differing} == {}
