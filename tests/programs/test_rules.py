"""Rules: who goes by which program."""

from typing import Any

import pytest
import torch

import thinwire
from thinwire import BF16, Exact, Int4, Int8, PowerSGD, Size
from thinwire.programs.rules import check_used, checked_rules, choose, exceptions_of, explain, explain_buckets
from thinwire.programs.wrapper import as_program

SHAPES = {
    "embed.weight": torch.Size((100, 8)),
    "norm.weight": torch.Size((8,)),
    "fc.weight": torch.Size((8, 8)),
    "fc.bias": torch.Size((8,)),
    "scale": torch.Size(()),
}


def table(rules: Any, program: Any) -> dict[str, Any]:
    return {name: choice.program for name, choice in choose(rules, program, SHAPES).items()}


def test_vectors_are_exact_by_default() -> None:
    assert exceptions_of((), Int8(), SHAPES) == dict.fromkeys(["norm.weight", "fc.bias", "scale"], Exact())


@pytest.mark.parametrize(
    "program",
    [
        thinwire.BF16(),
        thinwire.TopK(),
        thinwire.Warmup(thinwire.Sign(), steps=3),
        thinwire.AcrossNodes(thinwire.FP8(), node_size=1),
        PowerSGD(factor_dtype="bf16"),
        PowerSGD(flatten=True),
    ],
)
def test_whatever_compresses_them(program: Any) -> None:
    assert set(exceptions_of((), program, SHAPES)) == {"norm.weight", "fc.bias", "scale"}


@pytest.mark.parametrize(
    "program",
    [
        Exact(),
        PowerSGD(rank=2),
        thinwire.Partition([("fc.*", Int8())]),
        as_program(lambda bucket, memory: None),
    ],
)
def test_programs_that_send_them_as_they_are_or_choose_themselves_keep_them(program: Any) -> None:
    assert exceptions_of((), program, SHAPES) == {}


def test_the_first_rule_that_fits_holds() -> None:
    rules = [("*.bias", Int8()), (Size(at_least=800), BF16()), ("*", Int4())]
    assert table(rules, Exact()) == {
        "embed.weight": BF16(),
        "norm.weight": Int4(),
        "fc.weight": Int4(),
        "fc.bias": Int8(),
        "scale": Int4(),
    }
    assert table([(Size(below=8), Int8()), (Size(below=64, at_least=8), Int4())], Exact()) == {
        "embed.weight": Exact(),
        "norm.weight": Int4(),
        "fc.weight": Exact(),
        "fc.bias": Int4(),
        "scale": Int8(),
    }


def test_equal_programs_travel_together() -> None:
    program = Int8()
    rules = [("embed.*", Int4()), ("fc.weight", Int4()), ("norm.*", Int8())]
    chosen = table(rules, program)
    assert chosen["embed.weight"] is chosen["fc.weight"]
    assert chosen["norm.weight"] is program


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("fc", "must be pairs of a pattern or a Size and a program"),
        ([("fc.*",)], "must be pairs"),
        ([(3, Exact())], "must be pairs"),
        ([("fc.*", PowerSGD)], "the program for 'fc.*'=<class .*is not a program"),
    ],
)
def test_what_is_no_rule_is_refused(rules: Any, message: str) -> None:
    with pytest.raises(thinwire.OptionError, match=message):
        checked_rules(rules)


@pytest.mark.parametrize("options", [{}, {"below": -1}, {"below": "many"}, {"at_least": 1.5}])
def test_what_is_no_size_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(thinwire.OptionError, match="pass below=, at_least= or both"):
        Size(**options)


def test_rules_that_nobody_follows_are_refused() -> None:
    with pytest.raises(
        thinwire.OptionError, match=r"'head\.\*' is never used: it fits no parameter .* embed"
    ):
        check_used([("head.*", Exact())], SHAPES)
    with pytest.raises(thinwire.OptionError, match="earlier rules fit all its parameters"):
        check_used([("*.weight", Exact()), (Size(at_least=800), Exact())], SHAPES)


def test_the_table_says_what_and_why() -> None:
    program = Int4()
    text = explain(program, choose([("embed.*", BF16()), (Size(below=2), Int8())], program, SHAPES), SHAPES)
    assert text == "\n".join(
        [
            "parameter     shape    program  because",
            "embed.weight  100 x 8  BF16()   rule 'embed.*'",
            "norm.weight   8        Exact()  1-D tensors are exact unless a rule says otherwise",
            "fc.weight     8 x 8    Int4()   given to attach",
            "fc.bias       8        Exact()  1-D tensors are exact unless a rule says otherwise",
            "scale         scalar   Int8()   below 2 numbers",
            "",
            "BF16(): 1 of 5 parameters, 90.81% of numbers",
            "Exact(): 2 of 5 parameters, 1.82% of numbers",
            "Int4(): 1 of 5 parameters, 7.26% of numbers",
            "Int8(): 1 of 5 parameters, 0.11% of numbers",
        ]
    )


def test_smaller_buckets_are_recommended_where_gradients_would_leave_earlier() -> None:
    megabyte = 1 << 20
    assert "bucket_cap_mb=1)" in explain_buckets(Int8(), 25 * megabyte, 100 * megabyte)
    for program, bucket, gradients in ((Int8(), 25, 1), (Int8(), 1, 100), (Exact(), 25, 100)):
        text = explain_buckets(program, bucket * megabyte, gradients * megabyte)
        assert text == f"DDP hands gradients over in buckets of {bucket} MB."
