"""Different programs for different parameters."""

from typing import Any

import pytest
import torch

from tests.simulated import normal
from thinwire import Exact, Int8, OptionError, Partition, Quantize, SignBits, TwoShot, Warmup
from thinwire.testing import SimulatedRanks


def test_partition_gives_each_parameter_to_the_first_rule_that_fits() -> None:
    program = Partition(
        [("*.norm", Exact()), ("head.*", TwoShot(SignBits()))], default=TwoShot(Quantize(bits=4))
    )
    shapes = {"body.norm": (16,), "body.weight": (64,), "head.norm": (8,), "head.weight": (32,)}
    gradients = list(normal(0, 2, 120))
    exact = torch.stack(gradients).mean(0)
    mean = SimulatedRanks(program, shapes, 2).step(gradients)[0].mean
    parts = dict(zip(shapes, mean.split([16, 64, 8, 32]), strict=True))
    wanted = dict(zip(shapes, exact.split([16, 64, 8, 32]), strict=True))
    for name in ("body.norm", "head.norm"):
        torch.testing.assert_close(parts[name], wanted[name])
    assert parts["head.weight"].abs().unique().numel() == 1, "a magnitude for its only block"
    assert 2 < parts["body.weight"].abs().unique().numel() <= 15, "7 steps and zero in each of two chunks"
    assert (parts["body.weight"] - wanted["body.weight"]).abs().max() < 0.6


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([("conv.*", Exact())], r"the rule for 'conv\.\*' is never used: it fits no parameter .* fc.weight"),
        (
            [("*", Int8()), ("fc.*", Exact())],
            r"the rule for 'fc\.\*' .* earlier rules fit all its parameters",
        ),
    ],
)
def test_rules_that_no_parameter_follows_are_refused(rules: Any, said: str) -> None:
    shapes = {"fc.weight": torch.Size((2, 2)), "fc.bias": torch.Size((2,))}
    with pytest.raises(OptionError, match=said):
        Warmup(Partition(rules), steps=3).check(shapes, 2)
    Partition([("*.bias", Exact())]).check(shapes, 2)


@pytest.mark.parametrize("rules", ["fc", [(3, Exact())], [Exact()], [("a", Exact(), 1)]])
def test_rules_that_are_no_rules_are_refused(rules: Any) -> None:
    with pytest.raises(OptionError, match="pairs of a pattern or a Size and a program"):
        Partition(rules)
