"""Linear algebra that is the same on every host, and PowerSGD on hosts that compute unlike each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.powersgd import PASSES, passing
from tests.simulated import normal, stepping_in
from thinwire import PowerSGD
from thinwire.kernels import library
from thinwire.programs import reproducible
from thinwire.programs.reproducible import (
    bases_in_few_launches,
    bases_of,
    has_float64,
    product,
    stacked_product,
)
from thinwire.testing import SimulatedRanks

aten = torch.ops.aten


class OtherHost(TorchDispatchMode):
    """Sums up in another order, without fused multiply-adds, and has another LAPACK."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.mm.default, aten.bmm.default, aten.mm.out, aten.bmm.out):
            result = backwards(args[0].unsqueeze(-1) * args[1].unsqueeze(-3), dim=-2)
            return kwargs["out"].copy_(result) if "out" in kwargs else result
        if func is aten.sum.dim_IntList:
            return backwards(args[0], dim=args[1][0])
        result = func(*args, **kwargs)
        if func is aten.linalg_qr.default:
            return result[0] * (1 + 1e-6 * normal(0, *result[0].shape)), result[1]
        return result


class NoFloat64(TorchDispatchMode):
    """Raises where a tensor is in float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.dtype != torch.float64 for tensor in tensors), f"{func} in float64"
        return result


@contextmanager
def on_a_device(*, float64: bool) -> Iterator[None]:
    """Compute as on a device with or without float64, which has no native code if it is without."""
    if float64:
        yield
        return
    without = patch.object(reproducible, "has_float64", lambda device: False)
    with without, library.switched_off(), NoFloat64():
        yield


def backwards(terms: torch.Tensor, dim: int) -> torch.Tensor:
    first, *others = reversed(terms.unbind(dim))
    for other in others:
        first = first + other
    return first


def test_hosts_are_unlike() -> None:
    a, b = normal(0, 9, 30), normal(1, 30, 9)
    with OtherHost():
        other = a @ b
    assert not torch.equal(other, a @ b)
    torch.testing.assert_close(other, a @ b)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2},
        {"rank": 6},
        {"rank": 3, "flatten": True},
        {"rank": 6, "factor_dtype": "bf16"},
        {"rank": 6, "factor_dtype": "int8"},
        {"rank": 2, "warm_start": False, "residual": "sent"},
    ],
    ids=str,
)
def test_powersgd_gives_all_ranks_the_same_bits_on_unlike_hosts(
    options: dict[str, Any], dtype: torch.dtype, passes: str
) -> None:
    shapes = {"w": (40, 33), "v": (40, 33), "tall": (70, 12), "bias": (7,)}
    ranks = SimulatedRanks(
        stepping_in(OtherHost, PowerSGD(min_compression=0.5, warmup=0, **options), {1}), shapes, 3
    )
    length = sum(torch.Size(shape).numel() for shape in shapes.values())
    whole = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}[dtype]
    for step in range(4):
        gradients = normal(step, 3, length).to(dtype)
        gradients[:, : 5 * 33] = -0.0  # the first rows of w: hosts sum up zeros to 0 or to -0
        tall = gradients[:, 2 * 40 * 33 :][:, : 70 * 12].view(3, 70, 12)
        tall[:, :, 2:] = tall[:, :, :1]  # of rank 2, so that bases contain rounding errors
        with passing(passes):
            means = [one.mean.view(whole) for one in ranks.step(list(gradients))]
        assert torch.equal(means[0], means[1]), step
        assert torch.equal(means[0], means[2]), step


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("options", [{"rank": 2}, {"rank": 6}, {"rank": 6, "factor_dtype": "int8"}], ids=str)
def test_devices_without_float64_give_all_ranks_the_same_bits(options: dict[str, Any], passes: str) -> None:
    program = PowerSGD(min_compression=0.5, warmup=0, **options)
    ranks = SimulatedRanks(stepping_in(OtherHost, program, {1}), {"w": (40, 33), "tall": (70, 12)}, 3)
    with patch.object(reproducible, "has_float64", lambda device: False), library.switched_off():
        for step in range(3):
            gradients = normal(step, 3, 40 * 33 + 70 * 12)
            gradients[:, 12:24] = 0
            with NoFloat64(), passing(passes):
                means = [one.mean.view(torch.int32) for one in ranks.step(list(gradients))]
            assert torch.equal(means[0], means[1])
            assert torch.equal(means[0], means[2])


class Tf32(TorchDispatchMode):
    """Multiplies float32 matrices as a GPU does where the user has allowed TF32, here with bf16's 8 bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = (aten.mm.default, aten.bmm.default, aten.mm.out, aten.bmm.out)
        if func in products and args[0].dtype == torch.float32:
            self.rounded += 1
            args = tuple(factor.bfloat16().float() for factor in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("rank", [2, 6])
def test_ranks_that_round_products_otherwise_get_the_same_bits(rank: int, passes: str) -> None:
    """M Q and M^T P obey the switch, and are averaged. Everything after the averages is exact."""
    mode = Tf32()
    program = PowerSGD(rank=rank, min_compression=0.5, warmup=0)
    ranks = SimulatedRanks(stepping_in(lambda: mode, program, {1}), {"w": (40, 33), "tall": (70, 12)}, 2)
    with library.switched_off():
        for step in range(3):
            with passing(passes):
                means = [one.mean for one in ranks.step(list(normal(step, 2, 40 * 33 + 70 * 12)))]
            assert torch.equal(means[0], means[1])
    # Accelerators also compute P^T P.
    products = {"as on a CPU": 2, "as on an accelerator": 3}[passes]
    assert mode.rounded == 3 * 2 * products, "products of each of two matrices in a step"


def test_devices_with_and_without_float64() -> None:
    assert has_float64(torch.device("cpu"))
    assert has_float64(torch.device("cuda"))
    assert not has_float64(torch.device("mps"))
    with pytest.raises(AssertionError, match="in float64"), NoFloat64():
        bases_of([normal(0, 1, 2, 9)])


DTYPES = st.sampled_from(
    [(torch.float32, True), (torch.float32, False), (torch.float64, True), (torch.bfloat16, True)]
)
"""Dtypes, and whether the device has float64."""


@given(
    count=st.integers(1, 9),
    length=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    kind=DTYPES,
)
def test_a_basis_is_orthonormal_and_spans_what_it_is_made_from(
    count: int, length: int, seed: int, scale: float, kind: tuple[torch.dtype, bool]
) -> None:
    """Rows of very different size, dependent ones and zeros."""
    (dtype, float64), count = kind, min(count, length)
    rows = normal(seed, 3, count, length) * scale
    rows *= torch.logspace(0, -6, count)[:, None]
    rows[1, count // 2 :] = rows[1, :1]
    rows[2, count // 2 :] = 0
    rows = rows.to(dtype)
    with on_a_device(float64=float64):
        basis, another = bases_of([rows, rows[:, :1]])
    products = (basis.double() @ basis.double().mT).diagonal_scatter(torch.zeros(3, count).double(), 0, 1, 2)
    precision = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 0.05}[dtype]
    assert products.abs().max() <= precision
    norms = basis.double().norm(dim=-1)
    assert ((norms - 1).abs() <= precision).logical_or(norms == 0).all()
    assert torch.equal(another.double().norm(dim=-1) > 0.5, rows[:, :1].any(dim=-1))
    whole = rows.double() / rows.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)
    left = whole - (whole @ basis.double().mT) @ basis.double()
    assert left.norm(dim=-1).max() <= max(3 * precision, 1e-4 if dtype != torch.float64 else 2e-5)


@given(
    count=st.integers(2, 40),
    lower=st.integers(1, 40),
    length=st.sampled_from([8, 33, 40, 200, 1024]),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 3.0, 7.0]),
    noise=st.sampled_from([0.0, 1e-6, 1e-3]),
    kind=DTYPES,
)
def test_a_basis_of_dependent_rows_is_as_orthonormal_as_qrs(
    count: int,
    lower: int,
    length: int,
    seed: int,
    spread: float,
    noise: float,
    kind: tuple[torch.dtype, bool],
) -> None:
    """Rows of a lower rank, whose remainders are rounding errors, with singular values far apart."""
    (dtype, float64), count = kind, min(count, length)
    lower = min(lower, count)
    left = normal(seed, count, lower) * torch.logspace(0, -spread, lower)
    rows = (left @ normal(seed + 1, lower, length) + noise * normal(seed + 2, count, length)).to(dtype)[None]
    exact = rows.double()
    with on_a_device(float64=float64):
        (found,) = bases_of([rows])
    basis, reference = found.double(), torch.linalg.qr(exact.mT)[0].mT
    eps = torch.finfo(dtype).eps
    live = basis.norm(dim=-1) > 0
    off = (basis @ basis.mT - torch.diag_embed(live.double())).abs().max()
    assert off <= max(1e-12, 20 * eps), "the rows are not orthonormal"
    beyond, beyond_qrs = (
        ((exact - (exact @ span.mT) @ span).norm(dim=-1) / exact.norm(dim=-1)).max()
        for span in (basis, reference)
    )
    assert beyond <= beyond_qrs + max(1e-5, 20 * eps), "the span is another one"


@given(
    count=st.integers(1, 9),
    lower=st.integers(1, 9),
    length=st.sampled_from([9, 40, 1024]),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 3.0, 7.0]),
    noise=st.sampled_from([0.0, 1e-6, 1e-3]),
    kind=st.sampled_from([(torch.float32, True), (torch.float32, False), (torch.float64, True)]),
)
def test_a_basis_in_few_launches_projects_as_qrs_does(
    count: int,
    lower: int,
    length: int,
    seed: int,
    spread: float,
    noise: float,
    kind: tuple[torch.dtype, bool],
) -> None:
    """Several shapes in one batch, rows of a lower rank, and rows of zeros."""
    (dtype, float64), lower = kind, min(lower, count)
    left = normal(seed, count, lower) * torch.logspace(0, -spread, lower)
    rows = left @ normal(seed + 1, lower, length) + noise * normal(seed + 2, count, length)
    stacks = [
        torch.stack([rows, rows.flip(0), 0 * rows]).to(dtype),
        rows[:1, : length // 2 + 1].to(dtype)[None],
    ]
    with on_a_device(float64=float64):
        bases = bases_in_few_launches(stacks)
    for stack, found in zip(stacks, bases, strict=True):
        exact, basis = stack.double(), found.double()
        gram = basis @ basis.mT
        live = gram.diagonal(dim1=1, dim2=2) > 0
        assert (gram - torch.diag_embed(live.double())).abs().max() <= (
            1e-12 if dtype.itemsize == 8 else 2e-2
        )
        # As in PowerSGD, (2 - P^T P) is the inverse of P^T P, up to the square of the error.
        projected = (exact @ basis.mT) @ (2 * torch.eye(len(gram[0])).double() - gram) @ basis
        beyond = (exact - projected).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-300)
        assert beyond.max() <= 1e-4 if noise or spread else 1e-5
        assert torch.equal(basis[2:], exact[2:])


def test_few_launches_round_a_basis_alike_alone_and_in_a_batch() -> None:
    stacks = [normal(0, 2, 3, 900), normal(1, 4, 3, 1000), normal(2, 1, 2, 1024)]
    for stack, basis in zip(stacks, bases_in_few_launches(stacks), strict=True):
        assert torch.equal(basis, bases_in_few_launches([stack])[0])
    # Padding 50 short rows to the length of a long one would take too much memory.
    with patch.object(torch, "zeros", None):
        bases_in_few_launches([normal(0, 1, 2, 5000), normal(1, 50, 2, 20)])


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize(
    ("rank", "lower", "n", "m"),
    [
        (20, 16, 40, 60),
        (32, 16, 1024, 64),
        (32, 30, 300, 256),
        (4, 2, 64, 64),
        (6, 1, 500, 40),
        (8, 4, 4096, 30),
    ],
)
def test_a_gradient_of_a_lower_rank_than_powersgds_is_averaged_exactly(
    rank: int, lower: int, n: int, m: int, spread: float, passes: str
) -> None:
    program = PowerSGD(rank=rank, warmup=0, min_compression=0.1, error_feedback=False)
    for seed in range(5):
        left, right = normal(seed, n, lower).double(), normal(seed + 9, m, lower).double()
        left, right = torch.linalg.qr(left)[0], torch.linalg.qr(right)[0]
        gradient = ((left * torch.logspace(0, -spread, lower)) @ right.mT).float().flatten()
        ranks = SimulatedRanks(program, {"w": (n, m)}, 2)
        for _ in range(2):
            with passing(passes):
                mean = ranks.step([gradient.clone(), gradient.clone()])[0].mean
            assert (mean - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_basis_of_zeros_is_zero(dtype: torch.dtype) -> None:
    rows = torch.zeros(2, 5, 30, dtype=dtype)
    rows[1, 3] = 1e-30
    basis = bases_of([rows])[0]
    assert torch.equal(basis[0], rows[0])
    assert basis[1].any(dim=-1).tolist() == [False, False, False, True, False]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))
def test_a_product_is_the_product(n: int, m: int, rank: int, seed: int) -> None:
    p, q = normal(seed, rank, n), normal(seed + 1, rank, m)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        into = torch.full((n, m), torch.nan, dtype=dtype)
        with on_a_device(float64=dtype != torch.float32 or seed % 2 == 0):
            product(p.to(dtype), q.to(dtype), into)
        exact = p.to(dtype).double().mT @ q.to(dtype).double()
        torch.testing.assert_close(
            into, exact.to(dtype), rtol=2**-7 if dtype.itemsize == 2 else 1e-5, atol=1e-5
        )


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.integers(0, 10**6))
def test_a_product_of_stacks_has_the_bits_of_single_products(n: int, m: int, rank: int, seed: int) -> None:
    p, q = normal(seed, 3, rank, n), normal(seed + 1, 3, rank, m) * 1e-3
    for dtype in (torch.float32, torch.float64):
        # Equal distances in memory, with gaps.
        into = torch.full((3, n * m + 2), torch.nan, dtype=dtype)[:, : n * m].view(3, n, m)
        single = torch.empty(3, n, m, dtype=dtype)
        with (
            on_a_device(float64=dtype != torch.float32 or seed % 2 == 0),
            patch.object(reproducible, "_AT_ONCE_ON_A_DEVICE", 100),
        ):
            stacked_product(p.to(dtype), q.to(dtype), into)
            for place in range(3):
                product(p[place].to(dtype), q[place].to(dtype), single[place])
        assert torch.equal(into, single)


def test_products_larger_than_the_scratch_space() -> None:
    for rank in (2, 6):
        p, q = normal(0, rank, 700), normal(1, rank, 1100)
        into = torch.empty(700, 1100)
        product(p, q, into)
        torch.testing.assert_close(into, p.mT @ q)
