import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import DriftError
from thinwire.engine.simulate import simulate
from thinwire.monitors.replicas import (
    check_replicas,
    compare_replicas,
    fingerprint,
    fingerprints,
    gather_fingerprints,
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
    ranks = [[compare_replicas(names, fingerprints(model), 12)] for model in (good, good, bad)]
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
            if drifts:
                with pytest.raises(DriftError, match="'w' on rank 2 differs from that on rank 1"):
                    check_replicas(["w"], gathered, 3)
            else:
                check_replicas(["w"], gathered, 3)
