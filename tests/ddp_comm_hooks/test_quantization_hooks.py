"""What the torch-named quantization hooks make of their options."""

from typing import Any

import pytest

from thinwire import OptionError, Quantize, TwoShot
from thinwire.ddp_comm_hooks import quantization_hooks


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the hooks would run."""
    asked: list[Any] = []
    monkeypatch.setattr(
        quantization_hooks, "run_program", lambda program, group, bucket: asked.append(program)
    )
    return asked


def test_blocks_follow_the_bucket_size(programs: list[Any]) -> None:
    hooks: Any = quantization_hooks
    hooks.quantization_pertensor_hook(None, None)
    hooks.quantization_perchannel_hook(None, None)
    hooks.quantization_perchannel_hook(None, None, bucket_size=128)
    hooks.quantization_perchannel_hook(None, None, bucket_size=3)
    assert all(isinstance(program, TwoShot) for program in programs)
    assert [program.codec for program in programs] == [
        Quantize(bits=8, block=block) for block in (64, 64, 16, 1)
    ]


@pytest.mark.parametrize("size", [0, -4, True, 512.0, "512", None])
def test_bucket_sizes_that_are_none_are_refused(programs: list[Any], size: Any) -> None:
    with pytest.raises(OptionError, match=f"bucket_size={size!r} must be a whole number, at least 1"):
        quantization_hooks.quantization_perchannel_hook(None, None, size)  # type: ignore[arg-type]
    assert not programs
