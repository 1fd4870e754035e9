"""PowerSGD on simulated ranks: what it sends, that nothing is lost, and how well it approximates."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.powersgd import PASSES, SHAPES, Ranks, low_rank, mean_of, passing
from tests.simulated import compressing_alone
from thinwire import Memory, OptionError, PowerSGD, Warmup
from thinwire.engine.simulate import rehearse
from thinwire.programs.lowrank import orthonormal


@pytest.fixture(scope="module", autouse=True, params=PASSES)
def passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run all tests as on a CPU, and as on an accelerator."""
    with passing(request.param):
        yield


@given(
    world_size=st.integers(1, 7),
    rank=st.integers(1, 5),
    residual=st.sampled_from(["mean", "sent"]),
    factor_dtype=st.sampled_from([None, "int8", "bf16", "fp16"]),
    warm_start=st.booleans(),
    flatten=st.booleans(),
    buckets=st.integers(1, 4),
)
def test_nothing_is_lost(world_size: int, buckets: int, **options: Any) -> None:
    """All that was received, and what is still remembered, is all that was given."""
    ranks = Ranks(PowerSGD(min_compression=1, warmup=0, **options), world_size, buckets=buckets)
    given, received = ({name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for seed in range(4):
        gradients = ranks.gradients(seed)
        mean = ranks.average(gradients)
        for name in SHAPES:
            given[name] += mean_of(gradients, name)
            received[name] += mean[name]
    # A sum in half precision rounds by itself, and only "mean" hears of it.
    lossy = options["residual"] == "sent" and options["factor_dtype"] is not None
    tolerance = 0.1 if lossy else 1e-4
    for name in SHAPES:
        torch.testing.assert_close(received[name] + ranks.residual(name), given[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{}, {"residual": "sent"}, {"factor_dtype": "bf16"}, {"factor_dtype": "int8"}, {"flatten": True}],
)
def test_nothing_is_lost_when_the_warmup_ends(options: dict[str, Any]) -> None:
    """What is sent uncompressed later has no residual then, so the warm-up may leave none behind."""
    shapes: dict[str, tuple[int, ...]] = {"w": (40, 30), "small": (5, 5), "bias": (7,)}
    ranks = Ranks(PowerSGD(rank=2, warmup=2, **options), 3, shapes)
    given, received = ({name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for seed in range(4):
        gradients = ranks.gradients(seed)
        mean = ranks.average(gradients)
        for name in shapes:
            given[name] += mean_of(gradients, name)
            received[name] += mean[name]
    for name in shapes:
        torch.testing.assert_close(received[name] + ranks.residual(name), given[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"residual": "sent"}, {"factor_dtype": "bf16"}, {"factor_dtype": "int8"}, {"flatten": True}],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_lost_of_half_precision_gradients(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A residual in half precision would lose what it accumulates, and overflow near the dtype's range."""
    shapes: dict[str, tuple[int, ...]] = {"w": (40, 30), "bias": (7,)}
    ranks = Ranks(PowerSGD(rank=2, warmup=1, **options), 3, shapes, dtype)
    given, received = ({name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for seed in range(6):
        gradients = ranks.gradients(seed)
        mean = ranks.average(gradients)
        for name in shapes:
            given[name] += torch.stack([own[name].float() for own in gradients]).mean(0)
            received[name] += mean[name].float()
    # A sum in half precision rounds by itself, and only "mean" hears of it.
    tolerance = 0.1 if "residual" in options else 1e-4
    torch.testing.assert_close(received["w"] + ranks.residual("w"), given["w"], rtol=0, atol=tolerance)


def test_a_residual_beyond_the_range_of_float16_is_finite() -> None:
    """This rank's gradient less the mean of all may be twice as large as any of them."""
    ranks = Ranks(PowerSGD(rank=1, warmup=0, factor_dtype="bf16"), 3, {"w": (4,)}, torch.float16)
    gradients = [{"w": torch.full((4,), value).half()} for value in (6e4, -6e4, -6e4)]
    assert ranks.average(gradients)["w"].isfinite().all()
    gradients = [{"w": -own["w"]} for own in gradients]
    assert ranks.average(gradients)["w"].isfinite().all()


@pytest.mark.parametrize("value", [2e4, 6e4])
def test_factors_that_overflow_in_the_warmup_do_not_spoil_later_steps(value: float) -> None:
    """Of a float16 matrix of large numbers, Q overflows although the gradient and its mean do not."""
    ranks = Ranks(PowerSGD(rank=1, warmup=2), 2, {"w": (64, 64)}, torch.float16)
    for _ in range(2):
        assert ranks.average([{"w": torch.full((64, 64), value).half()}] * 2)["w"].isfinite().all()
    for seed in range(2):
        assert ranks.average(ranks.gradients(seed))["w"].isfinite().all()


@given(st.integers(1, 4), st.integers(0, 10**6))
def test_a_matrix_of_no_higher_rank_arrives_exactly(rank: int, seed: int) -> None:
    program = compressing_alone(PowerSGD(rank=rank, min_compression=0.1, warmup=0))
    ranks = Ranks(program, 1, {"w": (30, 20)}, torch.float64)
    matrix = low_rank(30, 20, rank, seed)
    mean = ranks.average([{"w": matrix}])
    torch.testing.assert_close(mean["w"], matrix, rtol=1e-6, atol=1e-6)


@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 10**6))
@settings(max_examples=15)  # 21 steps each
def test_the_error_is_near_that_of_the_best_truncation(rank: int, world_size: int, seed: int) -> None:
    """One step is at most that far off; a few warm steps on the same gradient reach the SVD's error."""
    program = PowerSGD(rank=rank, min_compression=0.1, error_feedback=False, warmup=0)
    ranks = Ranks(program, world_size, {"w": (30, 20)}, torch.float64)
    left, right = (torch.linalg.qr(low_rank(size, size, size, seed))[0][:, :20] for size in (30, 20))
    gradients = ranks.gradients(seed)
    for own in gradients:  # all ranks' mean has the singular values 1, 1/2, 1/4, ...
        own["w"] = left @ torch.diag(0.5 ** torch.arange(20, dtype=torch.float64)) @ right.T
    matrix = mean_of(gradients, "w")
    best = torch.linalg.svdvals(matrix)[rank:].norm()
    first = (matrix - ranks.average(gradients)["w"]).norm()
    for _ in range(20):
        last = (matrix - ranks.average(gradients)["w"]).norm()
    assert best * (1 - 1e-9) <= first <= matrix.norm()
    assert best * (1 - 1e-9) <= last <= 1.001 * best


def test_without_warm_start_every_step_begins_anew() -> None:
    ranks = Ranks(PowerSGD(rank=1, min_compression=1, warm_start=False, error_feedback=False, warmup=0), 2)
    gradients = ranks.gradients(0)
    first, second = ranks.average(gradients), ranks.average(gradients)
    assert not torch.equal(first["w"], second["w"])
    assert ranks.memories[0].state_dict() == {}


@given(st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_both_residuals_train_the_same(rank: int, world_size: int, flatten: bool) -> None:
    runs = [
        Ranks(
            PowerSGD(rank=rank, min_compression=1, residual=kind, flatten=flatten, warmup=0),
            world_size,
            dtype=torch.float64,
        )
        for kind in ("mean", "sent")
    ]
    for seed in range(5):
        against_mean, against_sent = (run.average(run.gradients(seed)) for run in runs)
        for name in SHAPES:
            torch.testing.assert_close(against_mean[name], against_sent[name], rtol=1e-6, atol=1e-9)


@given(st.integers(1, 7))
def test_many_buckets_give_what_one_gives(buckets: int) -> None:
    """Compression is by matrix and state by name, so the bucket does not matter."""
    one, many = (
        Ranks(PowerSGD(rank=2, min_compression=1, warmup=0), 3, buckets=count, dtype=torch.float64)
        for count in (1, buckets)
    )
    for seed in range(4):
        expected, got = one.average(one.gradients(seed)), many.average(many.gradients(seed))
        for name in SHAPES:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-12)


def test_rebuilt_buckets_lose_nothing() -> None:
    steady, rebuilt = (
        Ranks(PowerSGD(rank=2, min_compression=1, warmup=0), 2, dtype=torch.float64) for _ in range(2)
    )
    for seed in range(4):
        if seed == 2:
            rebuilt.buckets = [["bias", "conv"], ["v", "w", "none"], ["scalar", "tall"]]
        expected, got = steady.average(steady.gradients(seed)), rebuilt.average(rebuilt.gradients(seed))
        for name in SHAPES:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-12)


def collectives(program: PowerSGD, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """What one rank puts on the wire."""
    ranks = Ranks(compressing_alone(program), 1, shapes)
    (own,) = ranks.gradients(0)
    flat = torch.cat([part.flatten() for part in own.values()])
    steps = program(ranks.bucket(list(shapes), flat, 0, 0), Memory())
    sent: list[torch.Tensor] = []
    with suppress(StopIteration):
        sent.append(next(steps).tensor)  # type: ignore[union-attr] # PowerSGD awaits nothing
        while True:
            sent.append(steps.send(sent[-1]).tensor)  # type: ignore[union-attr]
    return sent


def test_two_collectives_that_carry_the_factors_and_all_else() -> None:
    program = PowerSGD(rank=2, min_compression=1, warmup=0)
    first, second = collectives(program)
    compressed = [(12, 9), (12, 9), (20, 4), (6, 12)]
    assert first.numel() == 2 * sum(n for n, _ in compressed) + 7 + 1
    assert second.numel() == 2 * sum(m for _, m in compressed)
    assert first.numel() + second.numel() == sum(program.numbers_sent(torch.Size(s)) for s in SHAPES.values())
    halves = collectives(PowerSGD(rank=2, min_compression=1, factor_dtype="bf16", warmup=0))
    assert [tensor.dtype for tensor in halves] == [torch.bfloat16] * 2
    assert [tensor.numel() for tensor in halves] == [first.numel(), second.numel()]


def bytes_of(factor_dtype: Any) -> int:
    """What one of four ranks sends of a matrix."""
    program = PowerSGD(rank=8, factor_dtype=factor_dtype, warmup=0)
    bucket = Ranks(program, 4, {"w": (512, 256)}).bucket(["w"], torch.ones(512 * 256), 0, 0)
    return sum(op.bytes_sent(0, 4) for op in rehearse(program(bucket, Memory()), 0, 4))


def test_factors_in_8_bits_take_a_quarter_of_the_bytes_and_a_scale_for_every_64() -> None:
    assert bytes_of("bf16") == bytes_of(None) / 2
    assert bytes_of("int8") == bytes_of(None) / 4 * (1 + 4 / 64)


def test_a_bucket_with_nothing_to_compress_takes_one_collective() -> None:
    (only,) = collectives(PowerSGD(rank=4, warmup=0), {"bias": (7,), "small": (3, 3)})
    assert only.numel() == 16


def test_a_matrix_not_worth_it_travels_as_it_is() -> None:
    """(n + m) rank min_compression < n m decides, as in torch."""
    assert PowerSGD(rank=1, min_compression=2, warmup=0).numbers_sent(torch.Size((4, 4))) == 16
    assert PowerSGD(rank=1, min_compression=1.9, warmup=0).numbers_sent(torch.Size((4, 4))) == 8


def straight_line(
    gradients: list[torch.Tensor], q: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The batched form by hand: the first n m numbers as a matrix, the tail exactly."""
    length = len(gradients[0])
    n = math.isqrt(length)
    m = length // n
    matrices = [own[: n * m].reshape(n, m) for own in gradients]
    p = torch.linalg.qr(sum(matrix @ q for matrix in matrices))[0]
    q = sum(matrix.T @ p for matrix in matrices) / len(gradients)
    tail = torch.stack([own[n * m :] for own in gradients]).mean(0)
    return torch.cat([(p @ q.T).flatten(), tail]), q


@given(st.integers(1, 4), st.integers(1, 4))
def test_the_batched_form_is_what_its_formula_says(rank: int, world_size: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (11, 7), "b": (5,), "c": (3, 3)}
    program = compressing_alone(PowerSGD(rank=rank, min_compression=0.1, flatten=True, warmup=0))
    ranks = Ranks(program, world_size, shapes, torch.float64)
    n = math.isqrt(11 * 7 + 5 + 9)
    q = torch.empty(0)
    errors = [torch.zeros(91, dtype=torch.float64) for _ in range(world_size)]
    for seed in range(4):
        gradients = ranks.gradients(seed)
        flat = [torch.cat([part.flatten() for part in own.values()]) for own in gradients]
        got = torch.cat([part.flatten() for part in ranks.average(gradients).values()])
        if seed == 0:  # begin where the program has begun: what it kept of Q spans what it started with
            q = ranks.memories[0].slot("a", f"q {min(rank, n)}x{91 // n}", torch.Tensor).T.clone()
            errors = [own - got for own in flat]
            continue
        corrected = [own + error for own, error in zip(flat, errors, strict=True)]
        expected, q = straight_line(corrected, torch.linalg.qr(q)[0], rank)
        errors = [own - expected for own in corrected]
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([1e-30, 1.0, 1e30]))
def test_a_basis_is_orthonormal_whatever_it_is_made_from(
    rank: int, length: int, seed: int, scale: float
) -> None:
    rank = min(rank, length)
    rows = torch.randn(2, rank, length, generator=torch.Generator().manual_seed(seed)) * scale
    rows[1, rank // 2 :] = 0
    basis = orthonormal(rows)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(rank).expand(2, -1, -1), rtol=0, atol=1e-5)


def test_warm_up_is_exact_first_and_then_the_program() -> None:
    ranks = Ranks(Warmup(PowerSGD(rank=1, min_compression=1, warmup=0), steps=2), 2)
    for seed in range(3):
        gradients = ranks.gradients(seed)
        mean = ranks.average(gradients)
        exact = torch.allclose(mean["w"], mean_of(gradients, "w"), atol=1e-6)
        assert exact is (seed < 2)
    with pytest.raises(OptionError, match="steps=-1"):
        Warmup(PowerSGD(), steps=-1)


def apart(mean: dict[str, torch.Tensor], gradients: list[dict[str, torch.Tensor]], name: str) -> float:
    exact = mean_of(gradients, name)
    return float((mean[name] - exact).norm() / exact.norm())


def test_the_warm_up_is_close_and_leaves_a_basis_for_the_first_low_rank_step() -> None:
    """Of a matrix whose directions differ little in size, one iteration from chance finds a worse basis."""
    cold, warm = (Ranks(PowerSGD(rank=4, warmup=steps), 2, {"w": (48, 40)}) for steps in (0, 6))
    directions = torch.linalg.qr(torch.randn(48, 40, generator=torch.Generator().manual_seed(1)))[0]
    gradients = [{"w": directions * 0.8 ** torch.arange(40.0)}] * 2
    first = apart(cold.average(gradients), gradients, "w")
    for _ in range(6):
        assert apart(warm.average(gradients), gradients, "w") < 0.25
    corrected = [{"w": gradients[0]["w"] + warm.residual("w")}] * 2
    assert apart(warm.average(gradients), corrected, "w") < 0.95 * first


@pytest.mark.parametrize(
    "options", [{}, {"factor_dtype": "bf16"}, {"factor_dtype": "int8"}, {"flatten": True}], ids=str
)
def test_nothing_is_lost_where_the_warm_up_ends(options: dict[str, Any]) -> None:
    """What was applied, and the residual that is left, are all that was given."""
    ranks = Ranks(PowerSGD(rank=1, min_compression=1, warmup=3, **options), 2, dtype=torch.float64)
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    applied = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    for seed in range(6):
        gradients = ranks.gradients(seed)
        for name in SHAPES:
            given[name] += mean_of(gradients, name)
        for name, mean in ranks.average(gradients).items():
            applied[name] += mean
    left = torch.stack([ranks.memories[rank].state_dict()["w"]["residual"] for rank in range(2)]).mean(0)
    torch.testing.assert_close(applied["w"] + left, given["w"], atol=1e-4, rtol=1e-4)
