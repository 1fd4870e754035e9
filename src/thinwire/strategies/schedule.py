"""Strategies by training step, such as exact gradients first, compressed ones later, averaged models last."""

from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.errors import OptionError
from thinwire.programs.description import ReprAsWritten
from thinwire.programs.wrapper import as_program
from thinwire.step.strategy import Attachable, Configuration, Stages, configuration_of


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

    stages: Mapping[int, Attachable]

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

    def at(self, step: int) -> Attachable:
        """Return the stage that runs in a step, as the user wrote it.

        Args:
            step: A training step.

        Returns:
            A program or configuration.
        """
        return self.stages[max(first for first in self.stages if first <= step)]


def stages_of(passed: Attachable | Schedule) -> Stages:
    """Return the stages of a schedule, or the one stage of a program or configuration."""
    if isinstance(passed, Schedule):
        return Stages({step: configuration_of(stage) for step, stage in passed.stages.items()}, passed)
    return Stages({0: configuration_of(passed)})
