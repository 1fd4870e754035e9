"""What every way of averaging models has in common: its options, and the questions it answers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.averaging.groups import Groups, check_groups
from thinwire.codecs.codec import is_whole
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.program import Program, require_program

BUFFERS = ("mean", "rank0", "local")
OPTIMIZER_STATES = ("local", "mean", "reset")


@dataclass(frozen=True)
class Average:
    """Something that is due: which fragment of the model to average, and among whom."""

    fragment: int = 0
    among: Groups = None
    """None: everybody."""


@dataclass(frozen=True, kw_only=True)
class Averaging(ABC):
    """Steps without communication, and models that are averaged now and then.

    Give it to `attach` in the place of a program, with the optimizer. A step ends with the optimizer's
    `step()`; where that was skipped, as a GradScaler does, with the next forward. Micro-batches belong under
    `no_sync`: without it each backward counts as a step.

    Args:
        warmup_steps: Steps at the start in which all gradients are exchanged, as plain DDP does. Models
            change fastest there, and averages of models that went far apart are bad models.
        within: Ranks whose gradients are averaged in every step after the warm-up: None, each rank alone;
            a number, so many consecutive ranks each, the last group smaller if need be; `"node"`, ranks on
            the same node, by torchrun's GROUP_RANK or else the host's name; lists of ranks; or this rank's
            process group, as `torch.distributed.new_subgroups` returns it.
        gradients: The program for gradients where they are exchanged: in the warm-up, and `within` groups.
        buffers: What becomes of buffers, such as BatchNorm's, when models are averaged: `"mean"` (whole
            numbers: the first rank's), `"rank0"`, the first rank's, or `"local"`, each rank keeps its own.
            After the warm-up DDP no longer broadcasts them.
        optimizer_state: What becomes of the optimizer's state when models are averaged: `"local"`, nothing;
            `"mean"`, it is averaged too, at two or three times the bytes; `"reset"`, it starts anew.
    """

    warmup_steps: int = 0
    within: Groups = None
    gradients: Program = field(default_factory=Exact)
    buffers: str = "mean"
    optimizer_state: str = "local"

    def __post_init__(self) -> None:
        check_whole("warmup_steps", self.warmup_steps, 0, "steps at the start that exchange all gradients")
        object.__setattr__(self, "within", check_groups("within", self.within))
        require_program(self.gradients, "gradients")
        check_choice("buffers", self.buffers, BUFFERS)
        check_choice("optimizer_state", self.optimizer_state, OPTIMIZER_STATES)

    @abstractmethod
    def due(self, step: int) -> Sequence[Average]:
        """What to average after so many steps, counted from the end of the warm-up."""

    def groups(self) -> Sequence[Groups]:
        """The groups that `due` may name."""
        return []

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Refuse what does not fit the model or the number of ranks."""
        check_size("within", self.within, world_size)


def check_whole(name: str, value: object, least: int, why: str) -> None:
    """Refuse what is no whole number, or too small a one."""
    if not is_whole(value) or value < least:
        raise OptionError(f"{name}={value!r} must be a whole number, at least {least}: {why}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is not on the list."""
    if value not in choices:
        raise OptionError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def check_size(name: str, groups: Groups, world_size: int) -> None:
    """Refuse groups of more ranks than there are, and lists of others."""
    if is_whole(groups) and groups > world_size:
        raise OptionError(f"{name}={groups} exceeds the {world_size} ranks of the model: give at most that")
    if isinstance(groups, tuple) and sum(map(len, groups)) != world_size:
        raise OptionError(
            f"{name}={groups!r} groups {sum(map(len, groups))} ranks, and the model has {world_size}: list"
            " all of them"
        )
