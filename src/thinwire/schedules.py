"""One run that changes its ways: exact at first, compressed later, averaged models at last."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from thinwire.averaging.diloco import DiLoCo
from thinwire.averaging.policy import Averaging
from thinwire.errors import OptionError
from thinwire.programs.program import Program, describe
from thinwire.sharding.zero import ZeRO

Runs: TypeAlias = Program | Averaging | ZeRO
"""What a wire can run."""


@dataclass(frozen=True)
class Schedule:
    """Programs, or ways of averaging, by the step from which each one runs.

    Give it to `attach` in the place of a program. The wire swaps by itself, as by `wire.swap`, on all ranks
    with the same step's forward; steps that overflowed do not count. One checkpoint holds it all: after a
    load the wire runs what it ran.

    Args:
        stages: By first step, the earliest 0.

    Example::

        diloco = thinwire.DiLoCo(period=32, program=thinwire.Int4())
        schedule = thinwire.Schedule({0: thinwire.Exact(), 1_000: thinwire.Int8(), 20_000: diloco})
        wire = thinwire.attach(ddp, schedule, optimizer=optimizer)
    """

    stages: Mapping[int, Runs]

    def __post_init__(self) -> None:
        steps = list(self.stages) if isinstance(self.stages, Mapping) else []
        if not all(isinstance(step, int) and step >= 0 for step in steps) or 0 not in steps:
            raise OptionError(
                f"stages={self.stages!r} must have whole steps as keys, 0 among them, such as"
                " {0: thinwire.Exact(), 1000: thinwire.Int8()}"
            )
        sharded = [stage for stage in self.stages.values() if isinstance(stage, ZeRO)]
        if sharded:
            raise OptionError(
                f"{sharded[0]!r} cannot be a stage: under ZeRO owners keep the optimizer's state, so it"
                " begins and ends with the DDP model"
            )
        object.__setattr__(self, "stages", dict(sorted(self.stages.items())))

    def at(self, step: int) -> Runs:
        """What runs in a step."""
        return self.stages[max(first for first in self.stages if first <= step)]


def stages_of(given: Runs | Schedule) -> list[Runs]:
    """All that a wire may run by itself."""
    return list(given.stages.values()) if isinstance(given, Schedule) else [given]


def gradient_program(runs: Runs) -> Program:
    """By what gradients go, where they are exchanged."""
    if isinstance(runs, Averaging):
        return runs.gradients
    return runs.program if isinstance(runs, ZeRO) else runs


def with_program(runs: Runs, program: Program) -> Runs:
    """The same, with another program for the models that it exchanges."""
    changed: Any = replace(runs, program=program) if isinstance(runs, DiLoCo) else runs
    result: Runs = changed
    return result


def with_gradients(runs: Runs, program: Program) -> Runs:
    """The same, with another program for gradients."""
    changed: Any = replace(runs, gradients=program) if isinstance(runs, Averaging) else program
    result: Runs = changed
    return result


def known_runs(given: Runs | Schedule, fallback: str | Program) -> dict[str, Runs]:
    """All that a wire may run by itself, by its description: stages, and what audits fall back to."""
    stages = stages_of(given)
    others = [] if isinstance(fallback, str) else [o for one in stages for o in fallbacks_of(one, fallback)]
    return {describe(one): one for one in (*others, *stages)}


def fallbacks_of(runs: Runs, program: Program) -> list[Runs]:
    """What may become of it when audits of gradients, of models, or of both turn to `program`."""
    gradients = with_gradients(runs, program)
    if not isinstance(runs, DiLoCo):
        return [gradients]
    return [gradients, with_program(runs, program), with_program(gradients, program)]
