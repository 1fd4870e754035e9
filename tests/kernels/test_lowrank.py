"""PowerSGD's native passes: the same bits of P Q^T as torch's path, and the same training."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import normal, stepping_in
from thinwire import (
    Int2,
    Int4,
    Int8,
    OptionError,
    PowerSGD,
    Sign,
    TopK,
)
from thinwire.kernels import library, lowrank
from thinwire.programs.reproducible import product
from thinwire.testing import SimulatedRanks

pytestmark = pytest.mark.skipif(library.native() is None, reason=library.status().detail)

sizes = st.integers(1, 45)
ranks = st.integers(1, 34)
seeds = st.integers(0, 10**6)


def factors(rank: int, n: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P and Q of very different magnitudes, with zeros of either sign."""
    p, q = normal(seed, rank, n), normal(seed + 1, rank, m)
    p[:, n // 2] = -0.0
    q[rank // 2] *= 1e-30
    q[:, m // 2] *= 1e20
    return p, q


@given(sizes, sizes, ranks, seeds, st.booleans())
def test_products_and_residuals_have_the_bits_of_torchs_path(
    n: int, m: int, rank: int, seed: int, tracked: bool
) -> None:
    p, q = factors(rank, n, m, seed)
    found = []
    for context in (nullcontext(), library.switched_off()):
        matrix, missed = normal(seed + 2, n, m), torch.full((n * m,), torch.nan)
        before = matrix.clone()
        with context:
            product(p, q, into=matrix, missed=missed if tracked else None)
        if tracked:
            assert torch.equal(missed.view(n, m), before - matrix)
        found.append((matrix.view(torch.int32), missed.view(torch.int32)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@given(sizes, sizes, ranks, seeds, st.booleans())
def test_both_other_passes_are_what_they_say(n: int, m: int, rank: int, seed: int, fed_back: bool) -> None:
    matrix, residual = normal(seed, n, m), normal(seed + 1, n, m)
    p, q = normal(seed + 2, rank, n), normal(seed + 3, rank, m)
    fed = matrix + residual if fed_back else matrix.clone()
    into = torch.full((rank, n), torch.nan)
    lowrank.times(matrix, residual if fed_back else None, q, into)
    assert torch.equal(matrix, fed)
    torch.testing.assert_close(into.double(), q.double() @ fed.double().mT, rtol=1e-5, atol=1e-4)
    into = torch.full((rank, m), torch.nan)
    lowrank.transposed_times(matrix, p, into)
    torch.testing.assert_close(into.double(), p.double() @ fed.double(), rtol=1e-5, atol=1e-4)


def test_tensors_that_do_not_fit_are_errors() -> None:
    matrix, p, q = torch.ones(4, 6), torch.ones(2, 4), torch.ones(2, 6)
    with pytest.raises(OptionError, match="do not fit each other"):
        lowrank.times(matrix, None, p, q)
    with pytest.raises(OptionError, match="do not fit each other"):
        lowrank.times(matrix, torch.ones(23), q, p)
    with pytest.raises(OptionError, match="do not fit each other"):
        lowrank.transposed_times(matrix.double(), p, q)
    with pytest.raises(OptionError, match="do not fit each other"):
        lowrank.product(torch.ones(5, 4), torch.ones(5, 6), matrix, None)


@pytest.mark.parametrize(
    ("program", "same_bits"),
    [
        (Int8(), True),
        (Int4(), True),
        (Int2(), True),
        (Sign(), True),
        (TopK(ratio=0.1), True),
        (PowerSGD(rank=2, min_compression=0.5, warmup=0), False),
        (PowerSGD(rank=6, min_compression=0.5, factor_dtype="bf16", warmup=0), False),
        (PowerSGD(rank=2, min_compression=0.5, residual="sent", warmup=0), False),
        (PowerSGD(rank=1, flatten=True, warmup=0), False),
    ],
    ids=str,
)
def test_ranks_with_and_without_native_code_agree(program: Any, same_bits: bool) -> None:
    """All ranks have the same means. Those of codecs are also the ones of ranks that all have native code."""
    shapes = {"w": (40, 33), "v": (40, 33), "tall": (70, 12), "bias": (7,)}
    length = sum(torch.Size(shape).numel() for shape in shapes.values())
    mixed, native = (
        SimulatedRanks(stepping_in(library.switched_off, program, {1}), shapes, 3),
        SimulatedRanks(program, shapes, 3),
    )
    for step in range(4):
        own = list(normal(step, 3, length))
        expected = [one.mean for one in native.step([x.clone() for x in own])]
        means = [one.mean for one in mixed.step(own)]
        assert torch.equal(means[0], means[1]), step
        assert torch.equal(means[0], means[2]), step
        if same_bits:
            assert torch.equal(means[0], expected[0]), step
        else:
            torch.testing.assert_close(means[0], expected[0], rtol=0.02, atol=0.02)
