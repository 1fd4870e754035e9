"""The base class of programs, and those of one all-reduce, on simulated ranks."""

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.algorithms import ddp_comm_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook  # noqa: F401 - loads it

import thinwire
import thinwire.ddp_comm_hooks.post_localSGD_hook
from thinwire import BF16, FP16, AllReduce, Bucket, Collectives, Exact, Memory, OptionError, Outcome, Program
from thinwire import ddp_comm_hooks as own_hooks
from thinwire.engine.comm.agreement import Described, shown
from thinwire.engine.simulate import simulate
from thinwire.programs.description import describe, short
from thinwire.programs.program import ProgramFunction, check_outcome
from thinwire.programs.rules import exceptions_of
from thinwire.programs.wrapper import as_program
from thinwire.step.strategy import Gradients, as_passed
from thinwire.strategies.schedule import stages_of

vectors: SearchStrategy[list[list[float]]] = st.integers(1, 9).flatmap(
    lambda length: st.lists(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=length, max_size=length), min_size=1, max_size=7
    )
)


def average(program: ProgramFunction, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's mean of one bucket."""

    def bucket(rank: int, own: torch.Tensor) -> Bucket:
        return Bucket(0, own.clone(), ("p",), (own.shape,), rank, len(gradients), step=0)

    ranks = [[program(bucket(rank, own), Memory())] for rank, own in enumerate(gradients)]
    return [result[0].mean for result in simulate(ranks).results]


@given(vectors)
def test_exact_is_the_mean(rows: list[list[float]]) -> None:
    gradients = [torch.tensor(row) for row in rows]
    expected = torch.stack(gradients).double().mean(0).float()
    for mean in average(Exact(), gradients):
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-2)


@given(vectors, st.sampled_from([(FP16(), 2**-11), (BF16(), 2**-8)]))
def test_a_cast_mean_is_within_its_rounding(rows: list[list[float]], how: tuple[Program, float]) -> None:
    program, half_ulp = how
    gradients = [torch.tensor(row) for row in rows]
    means = average(program, gradients)
    largest = torch.stack(gradients).abs().max(0).values
    error = (means[0] - torch.stack(gradients).double().mean(0)).abs()
    # One rounding of each term, and one for each addition.
    assert (error <= 2 * len(rows) * half_ulp * largest + 1e-6).all()
    assert all(torch.equal(mean, means[0]) for mean in means)


@given(st.integers(1, 7), st.floats(1, 65504, width=32))
def test_fp16_overflows_no_sooner_than_the_mean(size: int, large: float) -> None:
    """But for one rounding of each rank's part."""
    gradients = [torch.tensor([large * (1 - size * 2**-11)]) for _ in range(size)]
    assert average(FP16(), gradients)[0].isfinite().all()


def test_fp16_averages_what_fits_though_a_rank_alone_does_not() -> None:
    means = average(FP16(), [torch.tensor([70000.0]), torch.tensor([0.0])])
    assert means[0].item() == pytest.approx(35000, rel=2**-10)


@pytest.mark.parametrize("program", [Exact(), FP16(), BF16()])
def test_overflow_on_one_rank_reaches_all(program: Program) -> None:
    for mean in average(program, [torch.tensor([math.inf, 1.0]), torch.tensor([1.0, math.nan])]):
        assert not mean.isfinite().any()


@pytest.mark.parametrize("program", [Exact(), FP16(), BF16()])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_gradient_dtype(program: Program, dtype: torch.dtype) -> None:
    gradients = [torch.tensor([1, -2, 0], dtype=dtype), torch.tensor([3, 2, 0], dtype=dtype)]
    for mean in average(program, gradients):
        assert torch.equal(mean, torch.tensor([2, 0, 0], dtype=dtype))


def test_a_bucket_shows_its_parameters() -> None:
    shapes = (torch.Size((2, 2)), torch.Size(()))
    bucket = Bucket(3, torch.arange(5.0), ("w", "b"), shapes, 0, 1, step=0)
    assert bucket.views()["b"].item() == 4
    bucket.views()["w"].zero_()
    assert bucket.buffer.tolist() == [0, 0, 0, 0, 4]
    assert str(bucket) == "bucket 3 (w, b)"


def test_programs_describe_themselves_alike_on_all_ranks() -> None:
    def mine(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        mean = yield AllReduce(bucket.buffer)
        return Outcome(mean)

    assert describe(FP16()) == "Reduced(codec=Cast(dtype=torch.float16))"
    assert describe(mine).endswith("mine")
    assert describe(functools.partial(mine, memory=None)).endswith("mine, memory=None)")  # type: ignore[arg-type]

    class Opaque:
        def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
            return mine(bucket, memory)

    with pytest.raises(OptionError, match=r"does not show its options, .* frozen dataclass"):
        describe(Opaque())


@pytest.mark.parametrize("maker", [thinwire.Int8, thinwire.BF16, thinwire.TopK, thinwire.PowerSGD, Exact])
@pytest.mark.parametrize(
    "give",
    [
        lambda maker: as_program(maker),
        lambda maker: thinwire.Warmup(maker, steps=3),
        lambda maker: thinwire.ErrorFeedback(maker),
        lambda maker: thinwire.AcrossNodes(maker, node_size=1),
        lambda maker: thinwire.Partition([("w", maker)]),
        lambda maker: thinwire.Partition([("w", Exact())], default=maker),
        lambda maker: thinwire.DiLoCo(4, program=maker),
        lambda maker: thinwire.ZeRO(maker),
        lambda maker: thinwire.Schedule({0: Exact(), 5: maker}),
    ],
)
def test_what_makes_a_program_is_refused_at_once(maker: Any, give: Any) -> None:
    with pytest.raises(OptionError, match=rf"pass an instance by calling it, {maker.__name__}\(\)"):
        give(maker)


def own_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise NotImplementedError


@pytest.mark.parametrize("room", [torch_hooks, own_hooks], ids=["torch", "thinwire"])
@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (lambda room: room.default_hooks.allreduce_hook, r"pass thinwire\.Exact\(\), or register the hook"),
        (
            lambda room: room.default_hooks.fp16_compress_hook,
            r"pass thinwire\.FP16\(\), .*thinwire\.ddp_comm_hooks\.default_hooks\.fp16_compress_hook\)",
        ),
        (lambda room: room.default_hooks.bf16_compress_hook, r"pass thinwire\.BF16\(\)"),
        (lambda room: room.powerSGD_hook.powerSGD_hook, r"pass thinwire\.PowerSGD\(rank=4\)"),
        (
            lambda room: functools.partial(room.powerSGD_hook.batched_powerSGD_hook, None),
            r"pass thinwire\.PowerSGD\(rank=4, flatten=True\)",
        ),
        (lambda room: room.quantization_hooks.quantization_perchannel_hook, r"pass thinwire\.Int8\(\)"),
        (lambda room: room.post_localSGD_hook.post_localSGD_hook, r"pass thinwire\.LocalSGD\(period=8\)"),
        (lambda room: room.default_hooks.fp16_compress_wrapper(own_hook), "is a communication hook"),
        (lambda room: room.debugging_hooks.noop_hook, "noop_hook is a communication hook"),
        (lambda room: room.DDPCommHookType.BF16_COMPRESS, r"pass thinwire\.BF16\(\)"),
        (lambda room: own_hook, r"own_hook is a communication hook.*register_comm_hook\(state, own_hook\)"),
    ],
)
def test_a_communication_hook_is_refused_with_its_replacement(room: Any, hook: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        as_program(hook(room))


def test_any_callable_that_takes_bucket_and_memory_is_a_program() -> None:
    def plain(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        return (yield from Exact()(bucket, memory))

    def with_options(bucket: Bucket, memory: Memory, *, factor: float = 1) -> Collectives[Outcome]:
        return (yield from plain(bucket, memory))

    for program in (
        plain,
        with_options,
        functools.partial(with_options, factor=2),
        Exact(),
        Exact().__call__,
    ):
        as_program(program)
        thinwire.Schedule({0: program})
    with pytest.raises(OptionError, match=r"a program of your own takes \(bucket, memory\)"):
        as_program(lambda bucket: None)


def scaled(factor: float, by: object = None) -> ProgramFunction:
    """A program from a factory."""
    calls = 0

    def program(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        nonlocal calls
        calls += 1
        outcome = yield from Exact()(bucket, memory)
        return Outcome(outcome.mean * factor if by is None else outcome.mean)

    return program


def test_functions_are_described_by_name_and_by_what_they_close_over() -> None:
    name = "scaled.<locals>.program"
    program = scaled(2.0)
    assert describe(program) == f"{name}(by=None, factor=2.0)"
    average(program, [torch.ones(2)])
    assert describe(program) == f"{name}(by=None, factor=2.0)", "the count of its calls is no option"
    assert describe(scaled(2.0, object())) == f"{name}(factor=2.0)"
    warm: Any = scaled(3.0)
    nested = [("w", thinwire.Warmup(warm, steps=1)), ("v", functools.partial(scaled(4.0)))]
    assert describe(nested) == (
        f"[('w', Warmup(program={name}(by=None, factor=3.0), steps=1)),"
        f" ('v', functools.partial({name}(by=None, factor=4.0)))]"
    )


def of_rank(rank: Any = None, low_rank: Any = None, **others: Any) -> Any:
    local_rank, node_rank = others.get("local_rank"), others.get("node_rank")

    def program(
        bucket: Bucket, memory: Memory, factor: float = 1.0, *, keep: Any = 1
    ) -> Collectives[Outcome]:
        used = (rank, low_rank, local_rank, node_rank, factor, keep)
        assert used
        return (yield from Exact()(bucket, memory))

    return program


def test_ranks_are_left_out_of_a_description_and_options_that_sound_like_ranks_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    every = "local_rank=1, low_rank=4, node_rank=0, rank=3, factor=1.0, keep=1"
    program = of_rank(3, 4, local_rank=1, node_rank=0)
    assert describe(program) == f"of_rank.<locals>.program({every})"
    for variable, value in {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    assert describe(program) == "of_rank.<locals>.program(low_rank=4, factor=1.0, keep=1)"
    assert "rank=4.0" in describe(of_rank(4.0)), "a number of columns, say"
    assert "rank=2" in describe(of_rank(2)), "another process's"


def test_default_arguments_are_options() -> None:
    thing = object()

    def made(factor: float, block: int) -> Any:
        def program(
            bucket: Bucket, memory: Memory, by: float = factor, *, size: int = block, held: Any = thing
        ) -> Collectives[Outcome]:
            return (yield from Exact()(bucket, memory))

        return program

    assert describe(made(2.0, 8)).endswith("program(by=2.0, size=8)")
    assert describe(made(2.0, 8)) != describe(made(4.0, 8))
    assert describe(made(2.0, 8)) != describe(made(2.0, 4))


def test_two_functions_of_one_factory_are_two_programs() -> None:
    kept = object()
    one: Any = scaled(2.0, kept)
    other: Any = scaled(2.0, kept)
    default = Exact()
    shapes = {"a": (2, 2), "b": (2, 2), "c": (2, 2), "d": (2, 2)}
    rules = [("a", one), ("b", other), ("c", one)]
    assert exceptions_of(rules, default, shapes) == {name: as_program(function) for name, function in rules}
    wrapped = [
        ("a", thinwire.Warmup(one, 1)),
        ("b", thinwire.Warmup(other, 1)),
        ("c", thinwire.Warmup(one, 1)),
    ]
    a, b, c = exceptions_of(wrapped, default, shapes).values()
    assert a is c
    assert a is not b


def test_a_state_resumes_the_stage_that_was_running_among_those_that_look_alike() -> None:
    kept = object()
    one, other = scaled(2.0, kept), scaled(2.0, kept)
    plan = stages_of(thinwire.Schedule({0: one, 5: other}))
    first, second = plan.saved(describe(one), 3), plan.saved(describe(one), 7)
    assert first is not None
    assert as_passed(first) is one
    assert second is not None
    assert as_passed(second) is other
    assert plan.saved("Exact()", 7) is None


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (thinwire.Int8(), "Int8()"),
        (Gradients(thinwire.Int4(block=32)), "Int4(block=32)"),
        ([("bias", thinwire.Int8())], "[('bias', Int8())]"),
        ((1, None, thinwire.Int8()), "(1, None, Int8())"),
        ((thinwire.TopK(0.5),), "(TopK(ratio=0.5),)"),
        ({"a": thinwire.Sign()}, "{'a': Sign()}"),
    ],
)
def test_the_short_text_is_what_the_user_wrote_however_deep(thing: object, text: str) -> None:
    assert short(thing) == text


@given(
    st.lists(
        st.tuples(st.text(max_size=2), st.text(max_size=1)), min_size=2, max_size=4, unique_by=lambda t: t[0]
    )
)
def test_different_values_are_shown_as_written_unless_that_hides_the_difference(
    pairs: list[tuple[str, str]],
) -> None:
    texts = shown([Described(*pair) for pair in pairs])
    assert len(set(texts)) == len(texts), "different values look equal"
    if len({written for _, written in pairs}) == len(pairs):
        assert texts == [written for _, written in pairs]


def test_errors_of_programs_show_what_the_user_wrote() -> None:
    buffer = torch.zeros(4)
    bucket = Bucket(0, buffer, ("w",), (torch.Size((4,)),), 0, 1, 0)
    with pytest.raises(thinwire.ProgramError, match=r"^Int8\(\) returned a Tensor"):
        check_outcome(thinwire.Int8(), buffer, bucket)
    with pytest.raises(thinwire.ProgramError, match=r"^Int8\(\) returned a mean of"):
        check_outcome(thinwire.Int8(), Outcome(buffer[:2]), bucket)
