"""Two-shots of whole buckets through Triton's kernels."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton, which the dev extra installs on Linux with x86-64")


def test_whole_exchanges_have_the_bits_of_the_cpu() -> None:
    command = [sys.executable, "-m", "tests.programs.triton_exchanges"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300).stdout
    found: dict[str, tuple[int, int]] = json.loads(output)
    assert len(found) == 54
    assert all(compared > 1000 for compared, _ in found.values())
    assert {case: differing for case, (_, differing) in found.items() if differing} == {}
