"""Strategies by training step, such as exact gradients first, compressed ones later, averaged models last."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from thinwire.errors import OptionError, UnavailableError
from thinwire.monitors.auditor import OnExcess
from thinwire.programs.description import ReprAsWritten, describe
from thinwire.programs.program import Program, ProgramFunction
from thinwire.programs.wrapper import as_program
from thinwire.step.strategy import Configuration
from thinwire.strategies.gradients import configuration_of

Stage: TypeAlias = ProgramFunction | Configuration
"""A gradient program, or a configuration such as `DiLoCo(...)`."""


@dataclass(frozen=True, repr=False)
class Schedule(ReprAsWritten):
    """Programs and configurations by the step from which each one runs.

    Pass it to `attach` in place of a program. The wire swaps by itself, as `wire.swap` does, in the forward
    of the same step on all ranks. For that reason torch's `Join` is not available until the last stage has
    begun. A stage that ends loses nothing. The first step of the next one applies its residuals.

    A step is a backward pass that communicates, so micro-batches belong under `no_sync`. While models are
    averaged, a step ends with the optimizer's step. Steps that overflowed do not count. After a checkpoint is
    loaded, the wire continues with the stage that was running at the save.

    Args:
        stages: The program or configuration of each stage, by its first step. One must begin at step 0.

    Raises:
        OptionError: The keys are not steps, 0 is missing, or a stage cannot be swapped (ZeRO).

    Example::

        diloco = thinwire.DiLoCo(period=32, program=thinwire.Int4())
        schedule = thinwire.Schedule({0: thinwire.Exact(), 1_000: thinwire.Int8(), 20_000: diloco})
        wire = thinwire.attach(ddp, schedule, optimizer=optimizer)
    """

    stages: Mapping[int, Stage]

    def __post_init__(self) -> None:
        steps = list(self.stages) if isinstance(self.stages, Mapping) else []
        if not all(isinstance(step, int) and step >= 0 for step in steps) or 0 not in steps:
            raise OptionError(
                f"stages={self.stages!r} must have whole steps as keys, 0 among them, such as"
                " {0: thinwire.Exact(), 1000: thinwire.Int8()}"
            )
        for config in map(configuration_of, self.stages.values()):
            if not config.swappable:
                raise OptionError(f"{config!r} cannot be a stage: {config.fixed_because}")
            if not config.schedulable:
                raise OptionError(f"{config!r} cannot be a stage: it chooses its program by itself")
        for step, stage in self.stages.items():
            if not isinstance(stage, Configuration):
                as_program(stage, f"the stage from step {step}")
        object.__setattr__(self, "stages", dict(sorted(self.stages.items())))

    def at(self, step: int) -> Stage:
        """Return the stage that runs in a step, as the user wrote it.

        Args:
            step: A training step.

        Returns:
            A program or configuration.
        """
        return self.stages[max(first for first in self.stages if first <= step)]


class StagePlan:
    """The configurations that a wire runs by step, from a schedule or a single configuration."""

    def __init__(self, given: Stage | Schedule) -> None:
        stages = given.stages if isinstance(given, Schedule) else {0: given}
        self.given = given
        self._stages = {step: configuration_of(one) for step, one in stages.items()}

    @property
    def scheduled(self) -> bool:
        """True if the user passed a `Schedule`."""
        return isinstance(self.given, Schedule)

    @property
    def stages(self) -> list[Configuration]:
        """The configurations of all stages."""
        return list(self._stages.values())

    def at(self, step: int) -> Configuration:
        """Return the configuration that runs in a step."""
        return self._stages[max(first for first in self._stages if first <= step)]

    def check_join(self, joins: bool, step: int) -> None:
        """Raise UnavailableError if a later stage would begin inside torch's `Join`.

        A swap is collective and happens in forward. A rank that has run out of inputs runs no forward, so
        the others would wait for it until their time limit.
        """
        later = [first for first in self._stages if first > step]
        if later and joins:
            raise UnavailableError(
                f"a Schedule whose next stage begins at step {later[0]} cannot run inside Join (step {step}"
                " now): a rank that has run out of inputs would miss the swap; give every rank the same"
                " number of batches, or call wire.swap(program) outside of Join"
            )

    def saved(self, program: str, step: int) -> Configuration | None:
        """Return the stage of a step if a saved state names it, as stages may share a description."""
        due = self.at(step)
        return due if program == describe(due) else None

    def known(self, fallback: OnExcess) -> dict[str, Configuration]:
        """Return the stages, and before them the configurations that audits fall back to, by description."""
        own = [variant for one in self.stages for variant in one.variants()]
        others = [] if isinstance(fallback, str) else [two for one in own for two in _after(one, fallback)]
        return {describe(config): config for config in (*others, *own, *self.stages)}


def _after(config: Configuration, program: Program) -> list[Configuration]:
    """Return a configuration's variants after audits of gradients, of models, or of both fall back."""
    gradients = config.with_gradient_program(program)
    if config.model_program() is None:
        return [gradients]
    return [gradients, config.with_model_program(program), gradients.with_model_program(program)]
