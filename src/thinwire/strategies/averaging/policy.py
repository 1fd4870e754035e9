"""`Averaging`, the base class of configurations that average models, with their common options.

A subclass decides which averages are due after a step (`due`), and whether models or pseudo-gradients are
exchanged (`outer_loop`). `Averager` runs it.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch.optim import Optimizer

from thinwire.codecs.checks import check_whole, is_whole
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import describe
from thinwire.programs.program import Program
from thinwire.programs.wrapper import adapt
from thinwire.step.strategy import Configuration, Context, Strategy, Target
from thinwire.strategies.averaging.groups import Groups, check_groups

Buffers: TypeAlias = Literal["mean", "rank0", "local"]
OptimizerState: TypeAlias = Literal["local", "mean", "reset"]
Tuning: TypeAlias = Callable[[int], dict[str, float]]
"""A function from the number of replicas to options of the outer optimizer's parameter groups."""


@dataclass(frozen=True)
class Average:
    """An average that is due, of one fragment of the model among some ranks."""

    fragment: int = 0
    among: Groups = None
    """The groups that average, or None for all ranks."""


@dataclass(frozen=True)
class OuterLoop:
    """The options of an outer optimizer, for models that are exchanged as pseudo-gradients.

    Attributes:
        optimizer: A function that makes the outer optimizer from the anchors.
        program: The program for pseudo-gradients.
        fragments: The number of parts of the model, which are exchanged in turn.
        overlap: Steps between the start of an exchange and its application.
        mixing: The share of a rank's own parameters that is kept when it is applied.
        tuning: The rule that sets the outer optimizer's options before each of its steps. None leaves them
            unchanged.
    """

    optimizer: Callable[[Sequence[torch.nn.Parameter]], Optimizer]
    program: Program
    fragments: int
    overlap: int
    mixing: float
    tuning: Tuning | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Averaging(Configuration):
    """Base class of configurations that average models, which ranks train locally in between.

    Pass it to `attach` in place of a program, together with the optimizer. A step ends with the optimizer's
    `step()`, or with the next forward if the training loop skips the optimizer's step. Micro-batches belong
    under `no_sync`. Without it each backward counts as a step, which shortens the period, and thinwire warns.

    Args:
        warmup_steps: Steps at the start in which all gradients are exchanged, as in plain DDP. Models change
            fastest there, and the average of models that have diverged far is a bad model.
        within: Groups of ranks that average gradients in every step after the warm-up. None keeps gradients
            local. A number makes groups of that many consecutive ranks, of which the last may be smaller.
            `"node"` groups the ranks of a node, by torchrun's GROUP_RANK or else by host name. Lists of ranks
            and this rank's process group, as `torch.distributed.new_subgroups` returns it, are accepted too.
        gradients: The program for gradients in steps that exchange them, in the warm-up and `within` groups.
        buffers: How buffers, such as BatchNorm's, are treated when models are averaged. `"mean"` averages
            them, except integers, which are copied from the first rank. `"rank0"` copies all from the first
            rank. `"local"` leaves each rank its own. After the warm-up DDP no longer broadcasts them.
        optimizer_state: How the optimizer's state is treated when models are averaged. `"local"` leaves it
            unchanged. `"mean"` averages it too, which sends two or three times the bytes. `"reset"` clears
            it.
    """

    trains_locally: ClassVar[bool] = True
    exchanges_parameters: ClassVar[bool] = True
    optimizer_state_differs: ClassVar[bool] = True

    warmup_steps: int = 0
    within: Groups = None
    gradients: Program = field(default_factory=Exact)
    buffers: Buffers = "mean"
    optimizer_state: OptimizerState = "local"

    def __post_init__(self) -> None:
        check_whole("warmup_steps", self.warmup_steps, 0, "steps at the start that exchange all gradients")
        object.__setattr__(self, "within", check_groups("within", self.within))
        adapt(self, "gradients")
        check_choice("buffers", self.buffers, get_args(Buffers))
        check_choice("optimizer_state", self.optimizer_state, get_args(OptimizerState))

    @property
    def outer_loop(self) -> OuterLoop | None:
        """The outer optimizer's options, or None if models are set to their plain mean."""
        return None

    def validate(self, target: Target) -> None:
        """Raise OptionError if the optimizer is missing, or the options do not fit the model."""
        if not target.optimizers:
            raise OptionError(
                f"{self!r} averages models after the optimizer's steps: pass it, as in"
                " attach(ddp, ..., optimizer=optimizer)"
            )
        if not target.model.reduces_gradients:
            self._check_local()
        describe(self)
        self.check(target.trained_shapes(), target.model.group.size())

    def _check_local(self) -> None:
        """Raise OptionError if an option needs gradients to be exchanged, for a model without DDP."""
        for name in ("warmup_steps", "within"):
            if getattr(self, name):
                raise OptionError(
                    f"{name}={getattr(self, name)!r} averages gradients in backward, which needs DDP: wrap"
                    f" the module in DistributedDataParallel, or leave {name} out"
                )

    def bind(self, context: Context) -> Strategy:
        """Return the `Averager` that runs this configuration."""
        from thinwire.strategies.averaging.averager import Averager  # imports this module

        return Averager(self, context)

    def gradient_program(self) -> Program:
        """Return the program for gradients, in the warm-up and `within` groups."""
        return self.gradients

    def with_gradient_program(self, program: Program) -> Configuration:
        """Return the same configuration with another program for gradients."""
        return replace(self, gradients=program)

    @abstractmethod
    def due(self, step: int) -> Sequence[Average]:
        """Return the averages to start after a step.

        The first average comes after a whole period. torch's averager averages after the first local step,
        when models hardly differ yet.

        Args:
            step: The number of steps taken since the end of the warm-up.

        Returns:
            The averages, in the order in which they are started. Empty if none is due.
        """

    def groups(self) -> Sequence[Groups]:
        """Return all groups that `due` may name."""
        return []

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Check the options against a model.

        Args:
            shapes: The shapes of the trainable parameters by name.
            world_size: The number of ranks.

        Raises:
            OptionError: An option does not fit the model or the number of ranks.
        """
        check_size("within", self.within, world_size)
        self.gradients.check(shapes, world_size)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise OptionError unless `value` is one of `choices`."""
    if value not in choices:
        raise OptionError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def check_size(name: str, groups: Groups, world_size: int) -> None:
    """Raise OptionError if groups have more ranks than the model, or their lists leave some out."""
    if is_whole(groups) and groups > world_size:
        raise OptionError(f"{name}={groups} exceeds the {world_size} ranks of the model: pass at most that")
    if isinstance(groups, tuple) and sum(map(len, groups)) != world_size:
        raise OptionError(
            f"{name}={groups!r} groups {sum(map(len, groups))} ranks, and the model has {world_size}: list"
            " all of them"
        )
