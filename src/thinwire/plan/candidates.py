"""The candidates of a plan: plain DDP, gradient programs, and models that are averaged periodically."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.errors import OptionError
from thinwire.plan.traffic import Layout, Shapes
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import short
from thinwire.programs.program import Program, check_fit, require_program
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
        text: What the user wrote. Empty for plain DDP.
        given: What `attach` is given. None for plain DDP.
        bucket_mb: DDP's bucket size. None for its default.
    """

    text: str
    given: Attachable | None
    bucket_mb: float | None = None

    @classmethod
    def of(cls, text: str, given: Attachable | Schedule) -> "Candidate":
        """Return the candidate for what `attach` would be given.

        Raises:
            OptionError: It is neither a gradient program nor averages models, so it cannot be planned.
        """
        if isinstance(given, Averaging):
            if given.within is not None:
                raise OptionError(f"program={text!r} cannot be planned with within=: leave it out")
        elif isinstance(given, Schedule | Configuration):
            raise OptionError(
                f"program={text!r} cannot be planned: give gradient programs and averaged models such as"
                " DiLoCo(period=16), or measure it by thinwire bench"
            )
        return cls(text, given)

    @property
    def name(self) -> str:
        """The name in tables, without an outer optimizer, whose options fill a line."""
        if isinstance(self.given, Averaging):
            shown = short(self.given)
            begin = shown.find("outer=functools.partial(")
            end = shown.find(")", begin) + 1
            return shown if begin < 0 else (shown[:begin] + shown[end:].lstrip(", ")).replace(", )", ")")
        return PLAIN if self.given is None else short(self.given)

    @property
    def averaging(self) -> Averaging | None:
        """The configuration of averaged models, or None where gradients are averaged."""
        return self.given if isinstance(self.given, Averaging) else None

    @property
    def program(self) -> Program:
        """The program for gradients."""
        return Exact() if self.given is None else configuration_of(self.given).gradient_program()

    @property
    def period(self) -> int:
        """The steps after which costs repeat."""
        config = self.averaging
        levels = getattr(config, "levels", None)
        return 1 if config is None else int(max(levels) if levels else getattr(config, "period", 1))

    def validate(self, shapes: Shapes, ranks: int) -> None:
        """Raise OptionError if the candidate is not a program, or does not fit the model."""
        if self.given is None:
            return
        if self.averaging is None:
            require_program(self.given)
        check_fit(self.given, dict(shapes), ranks)


PLAIN_DDP = Candidate("", None)


@dataclass(frozen=True)
class ModelExchange:
    """One exchange of models.

    Attributes:
        layouts: What is exchanged.
        ranks: The number of ranks that exchange.
        overlap: Steps that it may overlap with.
    """

    layouts: tuple[Layout, ...]
    ranks: int
    overlap: int


def exchanges_of(config: Averaging, shapes: Shapes, ranks: int, period: int) -> list[ModelExchange]:
    """Return the exchanges of one period, as the configuration itself declares them due."""
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
            if config.optimizer_state == "mean":  # two tensors like the parameters, as Adam has
                found += [ModelExchange(_layouts(Exact(), own, members), members, 0)] * 2
    return found


def _members(due: Average, ranks: int) -> int:
    """Return the number of ranks that take part in an average."""
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
    """Return the bytes of anchors and of the outer optimizer's state, found by a step on one number."""
    if config.outer_loop is None:
        return 0
    anchor = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    anchor.grad = torch.zeros_like(anchor)
    outer = config.outer_loop.optimizer([anchor])
    outer.step()
    state = sum(one.numel() == 1 and one.dim() == 1 for one in _tensors(outer.state_dict()["state"]))
    return (1 + state) * 4 * sum(shape.numel() for shape in shapes.values())


def _tensors(state: object) -> Sequence[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [one for part in state.values() for one in _tensors(part)] if isinstance(state, dict) else []
