"""DiLoCo. Ranks train locally, and an outer optimizer steps with the mean of their pseudo-gradients.

The inner optimizer is the user's own, passed to `attach`. With Muon as the inner optimizer this is MuLoCo.
`Averager` counts the inner steps and calls `pseudo_gradients` and `outer_step`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import torch

from thinwire.codecs.checks import check_whole
from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import DERIVED_OPTIONS
from thinwire.programs.program import Program
from thinwire.programs.wrapper import adapt
from thinwire.strategies.averaging.anchors import Anchors
from thinwire.strategies.averaging.policy import Average, Averaging, OuterLoop

_RATE = 0.8
NESTEROV = partial(torch.optim.SGD, lr=_RATE, momentum=0.5, nesterov=True)
"""The outer optimizer for up to four replicas. `tuned_for` sets its options for any number."""


def tuned_for(replicas: int) -> dict[str, float]:
    """Return the outer optimizer's learning rate and momentum for a number of replicas.

    >>> tuned_for(2), tuned_for(16)
    ({'lr': 0.8, 'momentum': 0.5}, {'lr': 0.8, 'momentum': 0.75})
    """
    # Adam divides a gradient by its root mean square. A replica's own gradient is noisier than the mean over
    # W of them, by a factor of up to sqrt(W), so a local step moves the model by that much less than a step
    # of DDP. lr / (1 - momentum) of about sqrt(W) compensates. For two and four replicas 1.6 was good at low
    # and at tuned learning rates (docs/design/decisions.md).
    return {"lr": _RATE, "momentum": 1 - 1 / max(2.0, math.sqrt(replicas))}


# The update. After H inner steps from the anchor a, replica i holds the parameters x_i.
#
#   D_i = a - x_i              pseudo-gradient                         `pseudo_gradients`
#   D   = mean of D_i          the exchange, by the option `program`   `Membership.exchange`
#   a   = OuterOpt(a, D)       Nesterov                                `outer_step`
#   x_i = a                    the next H inner steps start here       `outer_step`
#
# SparseLoCo and Int4 differ in `program` alone, which keeps as a residual what it did not send of D_i.
# Streaming DiLoCo applies these lines to one fragment of the parameters at a time. Its overlap delays the
# third line by some inner steps, and mixing keeps a share of them in the fourth.


def pseudo_gradients(
    anchors: Anchors, parameters: Mapping[str, torch.Tensor], fragment: int
) -> dict[str, torch.Tensor]:
    """Return D_i = a - x_i of a fragment, by name."""
    # `a` is first rounded to what the parameters can hold. A bf16 model starts its window from that value.
    # Measured from the exact anchor, replicas that have not moved at all would push it back to a bf16 number,
    # and outer steps below bf16's precision would be lost.
    return {
        name: anchors[name].to(parameters[name].dtype).to(anchors[name].dtype) - parameters[name].detach()
        for name in anchors.fragments[fragment]
    }


def outer_step(
    anchors: Anchors,
    parameters: Mapping[str, torch.Tensor],
    fragment: int,
    mean: Mapping[str, torch.Tensor],
    loop: OuterLoop,
    replicas: int,
) -> None:
    """Apply the mean pseudo-gradient of a fragment to its anchors, then the anchors to the parameters.

    Every replica calls it with the same mean, and the outer optimizer's state is equal on all of them. So the
    new anchors are, too, and need not be sent.

    Args:
        anchors: a, with the outer optimizers.
        parameters: x_i, written in place.
        fragment: The fragment that was exchanged.
        mean: D, by name.
        loop: The outer optimizer's options.
        replicas: The number of replicas that contributed to D.
    """
    # a = OuterOpt(a, D), with D in place of a gradient.
    if loop.tuning is not None:
        anchors.tune(fragment, loop.tuning(replicas))
    anchors.step(fragment, mean)
    # x_i = a. With overlap, x_i has moved on since D_i was taken: mixing * x_i + (1 - mixing) * a.
    for name in anchors.fragments[fragment]:
        anchor, parameter = anchors[name], parameters[name]
        mixed = anchor.lerp(parameter.to(anchor.dtype), loop.mixing) if loop.mixing else anchor
        parameter.copy_(mixed)


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
