"""A user's type checker sees thinwire's types: `py.typed` is there, and public names are precise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import thinwire
from thinwire import telemetry


def train(model: torch.nn.Module, steps: int) -> str:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    wire = thinwire.attach(ddp, thinwire.DiLoCo(period=16, program=thinwire.Int4()), optimizer=optimizer)
    assert_type(wire, thinwire.Wire)
    with telemetry.watch(ddp, wire, telemetry.JsonLines("steps.jsonl")):
        for _ in range(steps):
            assert_type(wire.clip_grad_norm_(1.0), torch.Tensor)
            optimizer.step()
    assert_type(wire.step, int)
    assert_type(wire.stats(), thinwire.Stats)
    assert_type(wire.stats().records, tuple[thinwire.StepRecord, ...])
    wire.swap(thinwire.ErrorFeedback(thinwire.TwoShot(thinwire.Quantize(bits=8))))
    return wire.explain()


# mypy --strict reports an `ignore` without an error, so these are errors that it must find.
thinwire.attach(torch.nn.Linear(1, 1), "fast")  # type: ignore[arg-type]
thinwire.Int8(blocks=64)  # type: ignore[call-arg]
thinwire.Int9()  # type: ignore[attr-defined]
"""


@pytest.mark.slow  # without a cache mypy reads all of torch
def test_a_users_program_is_checked_against_the_types(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache/user"), "train.py"],
        cwd=tmp_path,  # away from thinwire's own configuration
        # A folder on PYTHONPATH is an installed package to mypy, which has types only with `py.typed`.
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
