"""Programs by the names that a user types."""

import functools
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import thinwire
from thinwire import OptionError
from thinwire.programs.description import describe
from thinwire.tools.bench.contestants import Contestant, line_up, rounds_needed
from thinwire.tools.bench.parsing import (
    PROGRAMS,
    _makes_programs,
    attach_line,
    parse_program,
    parse_saved,
    split_programs,
)


@dataclass(frozen=True)
class Mine(thinwire.Program):
    """A program of a user's own."""

    k: int = 1

    def __call__(
        self, bucket: thinwire.Bucket, memory: thinwire.Memory
    ) -> thinwire.Collectives[thinwire.Outcome]:
        mean = yield thinwire.AllReduce(bucket.buffer)
        return thinwire.Outcome(mean)


@dataclass(frozen=True)
class Small(Mine):
    """A program that asks for small buckets."""

    bucket_mb: ClassVar[float] = 0.5


class Broken(Mine):
    """A program that cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no luck")


@dataclass(frozen=True)
class PowerSGD(Mine):
    """A user's program with the name of one of thinwire's."""


def test_a_users_program_is_never_taken_for_one_of_thinwires() -> None:
    text = "tests.tools.bench.test_contestants:PowerSGD(k=2)"
    assert [(one.name, one.kind) for one in line_up([text])] == [
        ("DDP", "ddp"),
        (text, "thinwire"),
        ("no communication", "alone"),
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_of_the_list_is_public(name: str) -> None:
    assert repr(parse_program(name)) == repr(parse_program(name.lower())) == repr(getattr(thinwire, name)())


def test_a_users_own_program_with_options() -> None:
    assert parse_program("tests.tools.bench.test_contestants:Mine(k=3)") == Mine(k=3)
    assert parse_program("tests.tools.bench.test_contestants:Mine") == Mine()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int99", "'int99' is unknown: choose from Exact"),
        ("Exact(foo=1)", "unexpected keyword"),
        ("Exact(", "does not parse"),
        ("1 + 1", "does not work"),
        ("", "does not parse"),
        ("nosuch.module:Name", "No module named"),
        ("tests.tools.bench.test_contestants:Nobody", "has no 'Nobody'"),
        ("tests.tools.bench.test_contestants:Broken", "does not work .RuntimeError: no luck"),
        ("Exact(__import__('os'))", "'__import__' is unknown"),
        ("ThinwireError", "'ThinwireError' is unknown"),
        ("read_states('checkpoint')", "'read_states' is unknown"),
        ("save_checkpoint('checkpoint', Int8(), Int8(), Int8())", "'save_checkpoint' is unknown"),
        ("Warmup(load_checkpoint('checkpoint'), steps=3)", "'load_checkpoint' is unknown"),
        ("Quantize(bits=8)", "is not a program"),
        ("Int8(**{'block': 64})", r"\*\* is not possible here: write each option as name=value"),
        ("Warmup(*[Int8()])", r"\*\[Int8\(\)\] is neither a literal nor a program"),
        ("DiLoCo(period=4, outer=partial(Int8))", r"partial\(Int8\(\)\) must be of an optimizer"),
        (f"Int8(block={'-' * 200}1)", "does not parse .it has more than 50 levels"),
        (f"Int8(block={'-' * 3000}1)", "does not parse"),
        (f"Int8(block={'-' * 30_000}1)", "does not parse .it has more than 10000 characters"),
        (f"{'Warmup(' * 90}Int8{')' * 90}", "does not parse .it has more than 50 levels"),
        (f"{'Warmup(' * 900}Int8{')' * 900}", "does not parse"),
        ("Int8(\0)", "does not parse"),
        ("ZeRO(parameters=torch.nn)", "torch.nn is not a dtype"),
        ("ZeRO(parameters=os.path)", "os.path is not a dtype"),
        ("DiLoCo", "missing 1 required"),
    ],
)
def test_what_is_no_program_is_an_error_with_the_text(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_program(text)


def test_texts_of_files_make_programs_and_import_nothing() -> None:
    text = "tests.tools.bench.test_contestants:Mine(k=3)"
    assert parse_saved("Schedule({0: Exact, 5: Int8()})") == parse_program("Schedule({0: Exact, 5: Int8()})")
    with pytest.raises(OptionError, match="is code that a file names: pass it by --programs"):
        parse_saved(text)
    with pytest.raises(OptionError, match="is code that a file names"):
        parse_saved(text, ["tests.tools.bench.test_contestants:Mine(k=4)"])
    assert parse_saved(text, [text]) == Mine(k=3)


def test_a_text_can_call_nothing_but_makers_of_programs() -> None:
    """What else is public must not be called with arguments from a file."""
    callable_by_text = {name for name in thinwire.__all__ if _makes_programs(getattr(thinwire, name))}
    assert set(PROGRAMS) <= callable_by_text
    for name in callable_by_text:
        made = getattr(thinwire, name)
        rooms = ("thinwire.programs.", "thinwire.codecs.", "thinwire.strategies.", "thinwire.plan.")
        assert inspect.unwrap(made).__module__.startswith(rooms)
        assert isinstance(made, type) or made.is_preset
    others = {"attach", "load_checkpoint", "save_checkpoint", "read_states", "merge_optimizer_states", "Wire"}
    assert not callable_by_text & (others | {"Memory", "PerRank", "GatheredState", "Strategy", "Context"})


def test_strategies_and_their_options() -> None:
    assert parse_program("diloco(period=8, program=int4)") == thinwire.DiLoCo(
        period=8, program=thinwire.Int4()
    )
    assert parse_program("Hierarchical({2: 2, 8: None})") == thinwire.Hierarchical({2: 2, 8: None})
    assert parse_program("ZeRO(BF16, parameters=torch.bfloat16)") == thinwire.ZeRO(
        thinwire.BF16(), parameters=torch.bfloat16
    )
    assert parse_program("Schedule({0: Exact, 5: Int8()})") == thinwire.Schedule(
        {0: thinwire.Exact(), 5: thinwire.Int8()}
    )
    outer = parse_program("DiLoCo(period=4, outer=partial(torch.optim.SGD, lr=0.5))")
    assert isinstance(outer, thinwire.DiLoCo)
    assert outer.outer is not None
    assert outer.outer([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "exact",
        "DiLoCo(period=8, program=Int4(), outer=partial(torch.optim.SGD, lr=0.5))",
        "schedule({0: Exact, 5: Int8(block=64)})",
        "ZeRO(BF16, parameters=torch.bfloat16)",
        "Warmup(TopK(0.01), steps=26)",
    ],
)
def test_the_line_to_paste_makes_the_same_program(text: str) -> None:
    line = attach_line(text)
    given: list[object] = []
    fake = SimpleNamespace(**{name: getattr(thinwire, name) for name in thinwire.__all__})
    fake.attach = lambda ddp, program, optimizer=None: given.extend([program, optimizer])
    exec(line, {"thinwire": fake, "torch": torch, "functools": functools, "ddp": None, "optimizer": "o"})
    assert describe(given[0]) == describe(parse_program(text))
    assert (given[1] == "o") == isinstance(given[0], thinwire.Configuration | thinwire.Schedule)


@pytest.mark.parametrize(
    ("text", "cycle", "needed", "averages"),
    [
        ("Int8", 1, 2, False),
        ("LocalSGD(period=8)", 8, 16, True),
        ("LocalSGD(period=8, warmup_steps=5)", None, 21, True),
        ("Hierarchical({2: 2, 8: None})", 8, 16, True),
        ("ZeRO", 1, 2, False),
        ("Warmup(Int8(), steps=7)", None, 9, False),
        ("Schedule({0: Exact(), 20: DiLoCo(period=4)})", None, 28, True),
    ],
)
def test_how_long_it_takes_to_see_what_a_step_costs(
    text: str, cycle: int | None, needed: int, averages: bool
) -> None:
    contestant = Contestant(text, "thinwire", text)
    assert (contestant.cycle, contestant.averages_models) == (cycle, averages)
    assert rounds_needed(contestant.program) == needed


def test_every_contestant_has_the_buckets_that_suit_it() -> None:
    contestants = line_up(["int8", "PowerSGD(rank=2)", "bf16", "tests.tools.bench.test_contestants:Small"])
    chosen = {one.name: (one.bucket_mb(None), one.bucket_mb(4.0)) for one in contestants}
    assert chosen["DDP"] == chosen["BF16"] == (None, 4.0)
    assert chosen["Int8"] == (1.0, 4.0)
    assert chosen["tests.tools.bench.test_contestants:Small"] == (0.5, 4.0)
    one_bucket = chosen["torch powerSGD_hook rank 2"]
    assert one_bucket[0] == one_bucket[1]
    assert one_bucket[0] is not None
    assert one_bucket[0] > 10_000, "more than one bucket makes torch's hook race"


def test_strategies_have_torchs_counterparts() -> None:
    names = [one.name for one in line_up(["LocalSGD(period=4)", "ZeRO", "DiLoCo(period=4)"])]
    assert names[1:-1] == [
        "LocalSGD(period=4)",
        "torch PostLocalSGDOptimizer period 4",
        "ZeRO",
        "torch ZeroRedundancyOptimizer",
        "DiLoCo(period=4)",
    ]


def test_commas_within_brackets_do_not_split() -> None:
    assert split_programs("a(x=1, y=b(2,3)), c") == ["a(x=1, y=b(2,3))", "c"]


def test_plain_ddp_comes_first_and_torchs_hook_after_its_program() -> None:
    names = [one.name for one in line_up(["bf16", "exact"])]
    assert names == [
        "DDP",
        "BF16",
        "torch fp16_compress_hook",
        "Exact",
        "torch allreduce_hook",
        "no communication",
    ]
    assert [one.kind for one in line_up(["bf16"], with_torch=False)] == ["ddp", "thinwire", "alone"]


def test_naming_a_program_twice_is_an_error() -> None:
    with pytest.raises(OptionError, match="BF16 twice"):
        line_up(["bf16", "BF16"])


def test_programs_with_the_same_counterpart_share_it() -> None:
    texts = ["PowerSGD(rank=2)", "PowerSGD(rank=2, factor_dtype='bf16')", "PowerSGD(rank=4)"]
    rivals = [one.rival for one in line_up(texts) if one.kind == "thinwire"]
    assert rivals == [f"torch powerSGD_hook rank {rank}" for rank in (2, 2, 4)]
    assert [one.name for one in line_up(texts) if one.kind == "torch"] == list(dict.fromkeys(rivals))
