"""The kernels in Triton's interpreter, against the torch codecs: tables, masks, short blocks, aliasing."""

import json
import subprocess
import sys
from functools import cache

import pytest

pytest.importorskip("triton", reason="needs Triton, which the dev extra installs on Linux with x86-64")

from tests.kernels.triton.bits import SPARSE
from tests.kernels.triton.exchange import KINDS

Results = dict[str, dict[str, tuple[int, int]]]


@cache
def results() -> Results:
    """Return the numbers compared and differing, by exchange and kernel."""
    command = [sys.executable, "-m", "tests.kernels.triton.interpreted"]
    found: Results = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


@pytest.mark.parametrize("kind", [*KINDS, *SPARSE])
def test_interpreted_kernels_give_the_bits_of_the_torch_codec(kind: str) -> None:
    exchanges = {name: kernels for name, kernels in results().items() if name.startswith(f"{kind}-")}
    assert len(exchanges) >= (2 if kind in SPARSE else 7)
    for kernels in exchanges.values():
        assert len(kernels) == (7 if kind in SPARSE else 6)
        assert all(compared > 0 for compared, _ in kernels.values())
    differing = {
        (name, kernel): count
        for name, kernels in exchanges.items()
        for kernel, (_, count) in kernels.items()
        if count
    }
    assert not differing
