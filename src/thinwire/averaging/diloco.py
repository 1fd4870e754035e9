"""Train apart, exchange what has changed, and step from there with an outer optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch

from thinwire.averaging.policy import Average, Averaging, check_whole
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.program import Program, require_program

_NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class DiLoCo(Averaging):
    """Every rank trains on its own; after every `period` steps an outer optimizer steps for all of them.

        pseudo-gradient = anchor - parameters         what this rank's steps have changed, the other way round
        anchor          = outer(anchor, mean of all ranks' pseudo-gradients)
        parameters      = anchor

    The mean goes through any program: `program=Int4()` sends an eighth of the bytes on top of what the period
    saves. The anchor and the outer optimizer's state are kept by every rank, one or two copies of the model.

    Streaming: with `fragments` the model is exchanged in parts, in turn, so that no step waits for all of it;
    with `overlap` the exchange travels while the next steps are computed, and is then mixed in:

        parameters = mixing * parameters + (1 - mixing) * anchor

    Args:
        period: Steps from one exchange of a parameter to the next, counted from the end of the warm-up.
        outer: Makes the outer optimizer, given the anchors: a `torch.optim` class with its options, as in
            `partial(torch.optim.SGD, lr=1)`. Default: SGD with lr 0.7, momentum 0.9, Nesterov. The fewer
            exchanges a training has, the more a large learning rate and momentum matter.
        program: How pseudo-gradients are averaged.
        fragments: Into how many parts the model is cut, of about the same size each.
        overlap: Steps between the start of an exchange and its use; below `period`.
        mixing: The share of this rank's own parameters that is kept then. Default: 0.5 with overlap, else 0.

    Douillard et al.: DiLoCo, https://arxiv.org/abs/2311.08105; Streaming DiLoCo with overlapping
    communication, https://arxiv.org/abs/2501.18512.

    Example::

        diloco = thinwire.DiLoCo(period=32, program=thinwire.Int4())
        wire = thinwire.attach(ddp, diloco, optimizer=optimizer)
        ...  # train as before
        wire.finalize()
    """

    period: int
    outer: Callable[[Any], torch.optim.Optimizer] = _NESTEROV
    program: Program = field(default_factory=Exact)
    fragments: int = 1
    overlap: int = 0
    mixing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("period", self.period, 1, "steps from one exchange of a parameter to the next")
        require_program(self.program)
        check_whole("fragments", self.fragments, 1, "parts into which the model is cut")
        check_whole("overlap", self.overlap, 0, "steps between starting an exchange and using it")
        if self.fragments > self.period:
            raise OptionError(
                f"fragments={self.fragments} exceeds period={self.period}: each fragment is exchanged once in"
                " a period, at a step of its own"
            )
        if self.overlap >= self.period:
            raise OptionError(
                f"overlap={self.overlap} must be below period={self.period}: an exchange must have been used"
                " before the fragment's next one starts"
            )
        mixing = (0.5 if self.overlap else 0.0) if self.mixing is None else self.mixing
        if not isinstance(mixing, Real) or not 0 <= mixing < 1:
            raise OptionError(
                f"mixing={mixing!r} must be at least 0 and below 1: the share of a rank's own parameters that"
                " is kept; at 1 ranks would never meet"
            )
        object.__setattr__(self, "mixing", float(mixing))
        _check_outer(self.outer)

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Refuse more fragments than there are parameters."""
        super().check(shapes, world_size)
        if self.fragments > len(shapes):
            raise OptionError(
                f"fragments={self.fragments} exceeds the model's {len(shapes)} parameters that train"
            )

    def due(self, step: int) -> Sequence[Average]:
        """The fragments take turns, evenly spread over the period; the last one ends it."""
        turns = [
            (fragment, (fragment + 1) * self.period // self.fragments) for fragment in range(self.fragments)
        ]
        return [Average(fragment) for fragment, turn in turns if (step - turn) % self.period == 0]


def _check_outer(outer: Any) -> None:
    """Try it on a small parameter."""
    anchor = torch.nn.Parameter(torch.zeros(1))
    anchor.grad = torch.zeros(1)
    try:
        made, reason = outer([anchor]), "it makes none"
        if isinstance(made, torch.optim.Optimizer):
            made.step()
    except Exception as error:
        made, reason = None, f"{type(error).__name__}: {error}"
    if not isinstance(made, torch.optim.Optimizer):
        raise OptionError(
            f"outer={outer!r} must make an optimizer from parameters ({reason}): give a class with its"
            " options, as partial(torch.optim.SGD, lr=0.7)"
        )
