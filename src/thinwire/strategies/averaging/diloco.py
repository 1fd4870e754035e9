"""DiLoCo. Ranks train locally, and an outer optimizer steps with the mean of their pseudo-gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch

from thinwire.codecs.checks import check_whole
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import DERIVED_OPTIONS
from thinwire.programs.program import Program
from thinwire.programs.wrapper import adapt
from thinwire.strategies.averaging.outer import NESTEROV, tuned_for
from thinwire.strategies.averaging.policy import Average, Averaging, OuterLoop


@dataclass(frozen=True, repr=False)
class DiLoCo(Averaging):
    """Local training, with a step of an outer optimizer on all ranks after every `period` steps.

        pseudo-gradient = anchor - parameters         the change by this rank's steps, negated
        anchor          = outer(anchor, mean of all ranks' pseudo-gradients)
        parameters      = anchor

    Any program can compute the mean. `program=Int4()` sends an eighth of the bytes, in addition to the
    savings of the period. Every rank keeps the anchor and the outer optimizer's state, one or two copies of
    the model.

    Two options make it Streaming DiLoCo. With `fragments` the model is exchanged in parts, one after another,
    so that no step waits for all of it. With `overlap` an exchange runs during the next steps, and is then
    mixed in:

        parameters = mixing * parameters + (1 - mixing) * anchor

    Args:
        period: Steps from one exchange of a parameter to the next, counted from the end of the warm-up.
        outer: A function that makes the outer optimizer from the anchors, such as a `torch.optim` class with
            its options, `partial(torch.optim.SGD, lr=1)`. The default is SGD with lr 0.8 and Nesterov
            momentum. The momentum is 0.5 for up to 4 ranks and 1 - 1 / sqrt(W) for more, which is 0.65 for 8
            and 0.75 for 16. The papers use lr 0.7 and momentum 0.9, for trainings of many more exchanges.
        program: The program that averages pseudo-gradients.
        fragments: The number of parts of about equal size that the model is split into.
        overlap: Steps between the start of an exchange and its application, below `period`.
        mixing: The share of this rank's own parameters that is kept when an exchange is applied. Default: 0.5
            with overlap, else 0.
        warmup_steps: Steps at the start in which all gradients are exchanged. This option and those below are
            common to all averaged models, and described in `Averaging`.
        within: Ranks whose gradients are averaged in every step after the warm-up.
        gradients: The program for gradients in steps that exchange them.
        buffers: How buffers are treated when models are averaged: `"mean"`, `"rank0"` or `"local"`.
        optimizer_state: How the optimizer's state is treated then: `"local"`, `"mean"` or `"reset"`.

    Raises:
        OptionError: An option has a wrong type or value, or `outer` makes no optimizer.

    Douillard et al.: DiLoCo, https://arxiv.org/abs/2311.08105; Streaming DiLoCo with overlapping
    communication, https://arxiv.org/abs/2501.18512.

    Example::

        diloco = thinwire.DiLoCo(period=32, program=thinwire.Int4())
        wire = thinwire.attach(ddp, diloco, optimizer=optimizer)
        ...  # train as before
        wire.finalize()
    """

    period: int
    outer: Callable[[Any], torch.optim.Optimizer] | None = None
    program: Program = field(default_factory=Exact)
    fragments: int = 1
    overlap: int = 0
    mixing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("period", self.period, 1, "steps from one exchange of a parameter to the next")
        adapt(self, "program")
        check_whole("fragments", self.fragments, 1, "parts into which the model is split")
        check_whole("overlap", self.overlap, 0, "steps between starting an exchange and applying it")
        if self.fragments > self.period:
            raise OptionError(
                f"fragments={self.fragments} exceeds period={self.period}: each fragment is exchanged once in"
                " a period, at a step of its own"
            )
        if self.overlap >= self.period:
            raise OptionError(
                f"overlap={self.overlap} must be below period={self.period}: an exchange must be applied"
                " before the fragment's next one starts"
            )
        mixing = (0.5 if self.overlap else 0.0) if self.mixing is None else self.mixing
        if not isinstance(mixing, Real) or not 0 <= mixing < 1:
            raise OptionError(
                f"mixing={mixing!r} must be at least 0 and below 1: the share of a rank's own parameters that"
                " is kept; at 1 models would never be averaged"
            )
        if self.mixing is None:
            object.__setattr__(self, DERIVED_OPTIONS, ("mixing",))
        object.__setattr__(self, "mixing", float(mixing))
        if self.outer is not None:
            _check_outer(self.outer)

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Raise OptionError if there are more fragments than parameters, or groups do not fit the ranks."""
        super().check(shapes, world_size)
        self.program.check(shapes, world_size)
        if self.fragments > len(shapes):
            raise OptionError(
                f"fragments={self.fragments} exceeds the model's {len(shapes)} parameters that train"
            )

    @property
    def outer_loop(self) -> OuterLoop:
        """The outer optimizer's options."""
        outer, tuning = (NESTEROV, tuned_for) if self.outer is None else (self.outer, None)
        return OuterLoop(outer, self.program, self.fragments, self.overlap, self.mixing or 0.0, tuning)

    def model_program(self) -> Program:
        """Return the program for pseudo-gradients."""
        return self.program

    def with_model_program(self, program: Program) -> "DiLoCo":
        """Return the same configuration with another program for pseudo-gradients."""
        return replace(self, program=program)

    def due(self, step: int) -> Sequence[Average]:
        """Return the fragments due after a step, spread evenly over the period, the last at its end."""
        turns = [
            (fragment, (fragment + 1) * self.period // self.fragments) for fragment in range(self.fragments)
        ]
        return [Average(fragment) for fragment, turn in turns if (step - turn) % self.period == 0]


def _check_outer(outer: Any) -> None:
    """Raise OptionError if `outer` fails on a small parameter."""
    anchor = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    anchor.grad = torch.zeros_like(anchor)
    try:
        made, reason = outer([anchor]), "it makes none"
        if isinstance(made, torch.optim.Optimizer):
            made.step()
    except Exception as error:
        made, reason = None, f"{type(error).__name__}: {error}"
    if not isinstance(made, torch.optim.Optimizer):
        raise OptionError(
            f"outer={outer!r} must make an optimizer from parameters ({reason}): pass a class with its"
            " options, as partial(torch.optim.SGD, lr=0.7)"
        )
