"""The state of the torch-named PowerSGD: how it is saved, and what it draws."""

import io
import pickle
from typing import Any

import numpy
import pytest
import torch

from thinwire import Bucket
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, StateMemory, program

DRAWN = ((12, 9, 2), (12, 9, 2), (300, 8, 2))
"""Rows, columns and rank of the matrices that are drawn for."""


def used(**options: Any) -> PowerSGDState:
    state = PowerSGDState(None, matrix_approximation_rank=2, **options)
    state.rng.randint(1000, size=700)
    state.iter, state.error_dict["w"] = 3, torch.randn(4)
    return state


def check_same(loaded: PowerSGDState, state: PowerSGDState) -> None:
    assert loaded.process_group is None, "there is no default group here"
    assert loaded.iter == 3
    assert torch.equal(loaded.error_dict["w"], state.error_dict["w"])
    assert loaded.rng.randint(1000, size=700).tolist() == state.rng.randint(1000, size=700).tolist()


def test_a_saved_state_loads_by_torch_loads_default() -> None:
    state, file = used(random_seed=5), io.BytesIO()
    torch.save({"hook": state}, file)
    file.seek(0)
    check_same(torch.load(file)["hook"], state)


def starts_of(state: PowerSGDState, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = tuple(torch.Size(shape[:2]) for shape in DRAWN)
    flat = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype)
    names = tuple(f"p{number}" for number in range(len(shapes)))
    chosen, memory = program(state, flatten=False), StateMemory(state)
    bucket = Bucket(0, flat, names, shapes, 0, 1, 0)
    parts = chosen._parts(bucket, memory)
    return chosen._first_qs([parts[:2], parts[2:]], bucket, memory)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_q_is_drawn_as_torchs_without_the_global_generator(
    dtype: torch.dtype, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wire thread draws: seeding the global generator there would change the user's dropout masks."""
    state = PowerSGDState(None, 2, random_seed=7, batch_tensors_with_same_shape=together)
    randn, seeds = torch.randn, []

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        seeds.append(torch.initial_seed())
        return randn(*args, **options)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn", watched)
        ours = starts_of(state, dtype)
    assert set(seeds) == {1}
    assert torch.equal(torch.get_rng_state(), before)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(numpy.random.RandomState(7).randint(1_000_000_000))
        counts = [(2, 9), (1, 8)] if together else [(1, 9), (1, 9), (1, 8)]
        torchs = [torch.randn(count, columns, 2, dtype=dtype) for count, columns in counts]
    expected = [torch.cat(torchs[:-1]).mT, torchs[-1].mT]
    assert all(torch.equal(own, theirs) for own, theirs in zip(ours, expected, strict=True))


def test_the_log_of_a_loaded_state_names_the_attribute_to_set(caplog: pytest.LogCaptureFixture) -> None:
    pickle.loads(pickle.dumps(used()))
    assert "please set `self.process_group` after PowerSGD state is loaded" in caplog.messages[-1]
