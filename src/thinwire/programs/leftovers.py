"""Leftovers: residuals whose program no longer runs, which the next exchange of their parameter adds.

    a swap, a schedule, an audit or Auto changes the program    residuals become leftovers
    the next exchange of a parameter                            adds and drops its leftover

So a change of programs loses nothing. A leftover is part of the memory. A step that is rolled back keeps it,
and a saved state contains it. Adding it needs no collective, so ranks cannot disagree about it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from thinwire.codecs.rounding import add_scaled
from thinwire.engine.ops import Collectives
from thinwire.engine.pack import unpack
from thinwire.programs.across_nodes import slice_state
from thinwire.programs.memory import LEFTOVER, RESIDUAL, Memory
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.programs.wrapper import Wrapper

logger = logging.getLogger("thinwire")


def set_aside(memory: Memory) -> None:
    """Turn the residuals within a memory's scope into leftovers, because another program follows.

    Call it between steps. A residual under a scope of the user's own stays where it is, with a warning,
    because only the program that made the scope knows which gradients it belongs to.
    """
    declined = memory.set_aside(lambda slot: slice_state(slot, torch.Size((0,))).key == RESIDUAL)
    if declined:
        logger.warning(
            "the program has changed, and residuals in the slots %s are applied only by a program that reads"
            " them: thinwire does not know which gradients they belong to. Swap back to apply them, or keep"
            " residuals in the slot %r of the memory without a scope",
            ", ".join(map(repr, declined[:3])),
            RESIDUAL,
        )


def carrying(
    memory: Memory, program: Program, exceptions: Mapping[str, Program]
) -> tuple[Program, Mapping[str, Program]]:
    """Return the programs of an exchange, wrapped in `WithLeftovers` if the memory has some."""
    if not memory.has_leftovers:
        return program, exceptions
    wrapped = {id(other): WithLeftovers(other) for other in (program, *exceptions.values())}
    return wrapped[id(program)], {name: wrapped[id(other)] for name, other in exceptions.items()}


@dataclass(frozen=True, repr=False)
class WithLeftovers(Wrapper):
    """A program that adds leftovers to the gradients of a bucket, drops them, and runs another program.

    A program that feeds back residuals itself gets the leftover as its residual, which avoids rounding it to
    the dtype of the gradients.

    Args:
        program: The program to run.
        sign: 1 to add leftovers. -1 to subtract those of pseudo-gradients from parameters.
    """

    sign: int = 1

    stateless = False
    # Leftovers have the order of the parameter's numbers, and are dense.
    ignores_order = False
    takes_sparse = False

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Add the leftovers, and run the program."""
        for name, view in bucket.views().items():
            # -1 is for parameters instead of gradients, which have no slot "residual" of their own.
            own = self.sign == 1 and name not in bucket.exact and self.program.feeds_back(view.shape)
            for slot, leftover in memory.leftovers_of(name).items():
                if own and slot == RESIDUAL and leftover.numel() == view.numel():
                    shaped = leftover.reshape(view.shape)  # a program of the user's own may keep it flat
                    memory.slot(name, RESIDUAL, partial(torch.zeros_like, shaped)).add_(shaped)
                else:
                    _add(view, slot, leftover, self.sign)
                memory.drop(name, LEFTOVER + slot)
        return (yield from self.program(bucket, memory))


def add_residuals(bucket: Bucket, memory: Memory) -> None:
    """Add the residuals of a bucket's parameters to the gradients, and drop them.

    For programs that feed back errors, in a group of one rank. Nothing is compressed there, but a state that
    more ranks saved contains residuals.
    """
    for name, view in zip(bucket.names, unpack(bucket.buffer, bucket.shapes), strict=True):
        residual = memory.get(name, RESIDUAL)
        if residual is not None:
            _add(view, RESIDUAL, residual)
            memory.drop(name, RESIDUAL)


def _add(gradient: torch.Tensor, slot: str, residual: torch.Tensor, sign: int = 1) -> None:
    """Add a residual to the gradient that it belongs to, in place and in at least the residual's precision.

    A residual of `AcrossNodes` belongs to one slice of the mean over a node's ranks. This rank's gradient has
    only a share in that mean, so the residual is multiplied by the number of these ranks.
    """
    state = slice_state(slot, gradient.shape)
    if state.weight == 1 and residual.numel() != gradient.numel():
        logger.warning(
            "a residual of shape %s does not fit its gradient of shape %s, and is dropped: keep residuals in"
            " the shape of their parameter",
            tuple(residual.shape),
            tuple(gradient.shape),
        )
        return
    numbers = gradient.view(-1)[state.start :][: residual.numel()]
    # A slice may end with padding, which belongs to no parameter.
    own = residual.reshape(-1)[: numbers.numel()]
    precise = numbers.to(torch.promote_types(numbers.dtype, own.dtype))
    numbers.copy_(add_scaled(precise, own, sign * state.weight))
