"""The candidates of a plan: plain DDP, gradient programs, and models that are averaged periodically."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.errors import OptionError
from thinwire.plan.traffic import Layout, Shapes
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import short
from thinwire.programs.program import Program
from thinwire.programs.rules import exceptions_of
from thinwire.step.strategy import Attachable, Configuration, configuration_of
from thinwire.strategies.averaging.anchors import split_evenly
from thinwire.strategies.averaging.exchange import Members, packed
from thinwire.strategies.averaging.policy import Average, Averaging
from thinwire.strategies.schedule import Schedule

PLAIN = "DDP"
DEFAULTS = (
    "Exact",
    "BF16",
    "Int8",
    "Int4",
    "Int2",
    "FP8",
    "Sign",
    "TopK",
    "PowerSGD(rank=4, factor_dtype='bf16', warmup=0)",
    "PowerSGD(rank=8, factor_dtype='int8', warmup=0)",
    "PowerSGD(rank=16, factor_dtype='int8', warmup=0)",
    "DiLoCo(period=16)",
    "DiLoCo(period=16, program=Int4())",
    "DiLoCo(period=32, program=Int2())",
    "SparseLoCo(period=32)",
)
"""The programs of a plan, as text, which the command line parses. Plain DDP is always compared."""


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        text: The program as the user wrote it. Empty for plain DDP.
        argument: The argument of `attach`. None for plain DDP.
        bucket_mb: DDP's bucket size. None for its default.
    """

    text: str
    argument: Attachable | None
    bucket_mb: float | None = None

    @classmethod
    def of(cls, text: str, argument: Attachable | Schedule) -> "Candidate":
        """Return the candidate for an argument of `attach`.

        Raises:
            OptionError: The planner supports neither its strategy nor its options.
        """
        if isinstance(argument, Averaging):
            if argument.within is not None:
                raise OptionError(f"program={text!r} cannot be planned with within=: leave it out")
        elif isinstance(argument, Schedule | Configuration):
            raise OptionError(
                f"program={text!r} cannot be planned: pass gradient programs and averaged models such as"
                " DiLoCo(period=16), or measure it by thinwire bench"
            )
        return cls(text, argument)

    @property
    def name(self) -> str:
        """The name in tables, without an outer optimizer, whose options fill a line."""
        if isinstance(self.argument, Averaging):
            shown = short(self.argument)
            begin = shown.find("outer=functools.partial(")
            end = shown.find(")", begin) + 1
            return shown if begin < 0 else (shown[:begin] + shown[end:].lstrip(", ")).replace(", )", ")")
        return PLAIN if self.argument is None else short(self.argument)

    @property
    def averaging(self) -> Averaging | None:
        """The configuration of averaged models, or None where gradients are averaged."""
        return self.argument if isinstance(self.argument, Averaging) else None

    @property
    def program(self) -> Program:
        """The program for gradients."""
        return Exact() if self.argument is None else configuration_of(self.argument).gradient_program()

    @property
    def period(self) -> int:
        """The steps after which costs repeat."""
        config = self.averaging
        levels = getattr(config, "levels", None)
        return 1 if config is None else int(max(levels) if levels else getattr(config, "period", 1))

    def validate(self, shapes: Shapes, ranks: int) -> None:
        """Raise OptionError if the candidate is not a program, or does not fit the model."""
        if self.argument is None:
            return
        config = self.averaging
        if config is None:
            self.program.check(dict(shapes), ranks)
        else:
            config.check(dict(shapes), ranks)


PLAIN_DDP = Candidate("", None)


@dataclass(frozen=True)
class ModelExchange:
    """One exchange of models.

    Attributes:
        layouts: The tensors that are exchanged.
        ranks: The number of ranks that exchange.
        overlap: The number of training steps that it may overlap with.
    """

    layouts: tuple[Layout, ...]
    ranks: int
    overlap: int


def exchanges_of(config: Averaging, shapes: Shapes, ranks: int, period: int) -> list[ModelExchange]:
    """Return the exchanges of one period, from the configuration's own schedule."""
    loop = config.outer_loop
    program = Exact() if loop is None else loop.program
    fragments = split_evenly(
        {name: shape.numel() for name, shape in shapes.items()}, 1 if loop is None else loop.fragments
    )
    found = []
    for step in range(1, period + 1):
        for due in config.due(step):
            names = [*shapes] if loop is None else fragments[due.fragment]
            own = {name: shapes[name] for name in names}
            members = _members(due, ranks)
            overlap = 0 if loop is None else loop.overlap
            found.append(ModelExchange(_layouts(program, own, members), members, overlap))
            if config.optimizer_state == "mean":  # Adam has two tensors per parameter
                found += [ModelExchange(_layouts(Exact(), own, members), members, 0)] * 2
    return found


def _members(due: Average, ranks: int) -> int:
    return due.among if isinstance(due.among, int) else ranks


def _layouts(program: Program, shapes: Shapes, ranks: int) -> tuple[Layout, ...]:
    tensors = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    members = Members(tuple(range(ranks)), 0, ranks)
    work = packed(tensors, program, exceptions_of((), program, shapes), members, 0)
    return tuple(
        Layout.of(chosen, bucket.names, dict(zip(bucket.names, bucket.shapes, strict=True)), bucket.exact)
        for chosen, bucket in work
    )


def outer_bytes(config: Averaging, shapes: Shapes) -> int:
    """Return the bytes of anchors and of the outer optimizer's state."""
    if config.outer_loop is None:
        return 0
    # An optimizer makes its state in its first step, so one step on a single number shows how much it keeps.
    anchor = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    anchor.grad = torch.zeros_like(anchor)
    outer = config.outer_loop.optimizer([anchor])
    outer.step()
    state = sum(tensor.numel() == 1 and tensor.dim() == 1 for tensor in _tensors(outer.state_dict()["state"]))
    return (1 + state) * 4 * sum(shape.numel() for shape in shapes.values())


def _tensors(state: object) -> Sequence[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for part in state.values() for tensor in _tensors(part)] if isinstance(state, dict) else []
