"""Fingerprints of parameters, and the comparison of replicas by them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import DriftError
from thinwire.engine.simulate import simulate
from thinwire.monitors.replicas import (
    compare_replicas,
    find_drift,
    fingerprint,
    fingerprints,
    gather_fingerprints,
    only_rounded,
    sample_of,
)

dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])


@given(dtypes, st.integers(1, 200), st.data())
def test_one_changed_bit_changes_the_fingerprint(
    dtype: torch.dtype, length: int, data: st.DataObject
) -> None:
    tensor = torch.randn(length, dtype=dtype)
    flipped = tensor.clone()
    raw = flipped.view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(tensor) != fingerprint(flipped)
    assert fingerprint(tensor) == fingerprint(tensor.clone())


def test_two_swapped_elements_change_the_fingerprint() -> None:
    assert fingerprint(torch.tensor([1.0, 2.0])) != fingerprint(torch.tensor([2.0, 1.0]))


@given(dtypes, st.integers(2, 60_000), st.data())
def test_two_changed_signs_or_swapped_numbers_change_the_fingerprint(
    dtype: torch.dtype, length: int, data: st.DataObject
) -> None:
    """A sign is a word's top bit, whose changes would cancel modulo a power of two."""
    tensor = torch.randn(length, dtype=dtype)
    one, other = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2, unique=True))
    changed, swapped = tensor.clone(), tensor.clone()
    changed[[one, other]] = -changed[[one, other]]
    assert fingerprint(tensor) != fingerprint(changed)
    swapped[one] = -swapped[other]
    flipped = swapped.clone()
    flipped[[one, other]] = swapped[[other, one]]
    assert fingerprint(swapped) != fingerprint(flipped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_the_place_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    """A view into a flat buffer need not be aligned to words."""
    whole = torch.randn(40_000).to(dtype)
    for start in range(5):
        assert fingerprint(whole[start:]) == fingerprint(whole[start:].clone())


@pytest.mark.parametrize("shape", [(0,), (), (1,), (1 << 20,), ((1 << 20) + 1,), (2, 3, 4)])
def test_any_shape_has_a_fingerprint(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert fingerprint(tensor) == fingerprint(tensor.clone())


def test_layout_does_not_matter() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    assert fingerprint(tensor) == fingerprint(tensor.to(memory_format=torch.channels_last))


def test_the_first_drifted_parameter_is_named() -> None:
    good = [torch.ones(3), torch.zeros(2), torch.zeros(1)]
    bad = [torch.ones(3), torch.ones(2), torch.ones(1)]
    names = ["a", "b", "c"]
    ranks = [[compare_replicas(names, fingerprints(model), 12, range(3))] for model in (good, good, bad)]
    with pytest.raises(DriftError, match=r"step 12 parameter 'b' on rank 2 .*2 of 3 parameters differ"):
        simulate(ranks)


def test_ranks_that_ran_out_of_inputs_are_not_compared() -> None:
    joined, good, bad = [torch.zeros(2)], [torch.ones(2)], [torch.zeros(2)]
    for third, drifts in ((good, False), (bad, True)):
        ranks = [
            [gather_fingerprints(fingerprints(model), active)]
            for model, active in ((joined, False), (good, True), (third, True))
        ]
        for (gathered,) in simulate(ranks).results:
            drift = find_drift(["w"], [2], gathered, 3, range(3))
            if drifts:
                assert drift is not None
                assert "'w' on rank 2 differs from that on rank 1" in str(drift.error)
            else:
                assert drift is None


def test_rounding_explains_small_differences_and_no_others() -> None:
    """In a thousand steps: two ways to round, and one rank that leaves out a single step."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        one = torch.randn(500, dtype=dtype) * 0.05
        other, skipped = one.clone(), one.clone()
        for step in range(1000):
            update = 1e-4 * torch.randn(500, dtype=dtype)
            one.add_(update)
            other.copy_(torch.nextafter(other + update, torch.randn(500, dtype=dtype) * torch.inf))
            if step:
                skipped.add_(update)
        assert not torch.equal(one, other)
        assert only_rounded([sample_of(each) for each in (one, other, one)], dtype, 1000)
        assert not only_rounded([sample_of(each) for each in (one, one, skipped)], dtype, 1000)
    nan = torch.full((3,), torch.nan)
    assert not only_rounded([sample_of(torch.ones(3)), sample_of(nan)], torch.float32, 1000)
    assert sample_of(torch.arange(3.0)) == [0.0, 1.0, 2.0]
    assert len(sample_of(torch.ones(100, 100))) == 64
    assert sample_of(torch.ones(()).bfloat16()) == [1.0]
