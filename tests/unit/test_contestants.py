"""Programs by the names that a user types."""

from dataclasses import dataclass

import pytest

import thinwire
from thinwire import OptionError
from thinwire.bench.contestants import PROGRAMS, line_up, parse_program, split_programs


@dataclass(frozen=True)
class Mine:
    """A program of a user's own."""

    k: int = 1

    def __call__(self, bucket: thinwire.Bucket, memory: thinwire.Memory) -> thinwire.Steps[thinwire.Outcome]:
        mean = yield thinwire.AllReduce(bucket.buffer)
        return thinwire.Outcome(mean)


class Broken(Mine):
    """A program that cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no luck")


@dataclass(frozen=True)
class PowerSGD(Mine):
    """A user's program with the name of one of thinwire's."""


def test_a_users_program_is_never_taken_for_one_of_thinwires() -> None:
    text = "tests.unit.test_contestants:PowerSGD(k=2)"
    assert [(one.name, one.kind) for one in line_up([text])] == [
        ("DDP", "ddp"),
        (text, "thinwire"),
        ("no communication", "alone"),
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_of_the_list_is_public(name: str) -> None:
    assert repr(parse_program(name)) == repr(parse_program(name.lower())) == repr(getattr(thinwire, name)())


def test_a_users_own_program_with_options() -> None:
    assert parse_program("tests.unit.test_contestants:Mine(k=3)") == Mine(k=3)
    assert parse_program("tests.unit.test_contestants:Mine") == Mine()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int99", "'int99' is unknown: choose from Exact"),
        ("Exact(foo=1)", "unexpected keyword"),
        ("Exact(", "does not parse"),
        ("1 + 1", "does not work"),
        ("", "does not parse"),
        ("nosuch.module:Name", "No module named"),
        ("tests.unit.test_contestants:Nobody", "has no 'Nobody'"),
        ("tests.unit.test_contestants:Broken", "does not work .RuntimeError: no luck"),
        ("Exact(__import__('os'))", "'__import__' is unknown"),
        ("ThinwireError", "is not a program"),
    ],
)
def test_what_is_no_program_is_an_error_with_the_text(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_program(text)


def test_commas_within_brackets_do_not_split() -> None:
    assert split_programs("a(x=1, y=b(2,3)), c") == ["a(x=1, y=b(2,3))", "c"]


def test_plain_ddp_comes_first_and_torchs_hook_after_its_program() -> None:
    names = [one.name for one in line_up(["bf16", "exact"])]
    assert names == [
        "DDP",
        "BF16",
        "torch bf16_compress_hook",
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
    assert rivals == [f"torch powerSGD_hook rank {rank}, one bucket" for rank in (2, 2, 4)]
    assert [one.name for one in line_up(texts) if one.kind == "torch"] == list(dict.fromkeys(rivals))
