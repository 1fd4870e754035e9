"""What is averaged beside the parameters: the model's buffers and the optimizer's state."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from thinwire.wire.ops import AllReduce, Broadcast, Steps
from thinwire.wire.pack import pack, unpack


def share_buffers(buffers: Sequence[torch.Tensor], how: str, size: int) -> Steps[torch.Tensor]:
    """Make buffers equal in place: their mean over ranks, where that makes sense, or the first rank's."""
    done = torch.zeros(0)
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = pack(alike)
        if how == "mean" and (dtype.is_floating_point or dtype.is_complex):
            flat = yield AllReduce(flat.mul_(1 / size))
        else:
            flat = yield Broadcast(flat, src=0)
        for buffer, shared in zip(alike, unpack(flat, [one.shape for one in alike]), strict=True):
            buffer.copy_(shared)
    return done


def mean_of_states(
    parameters: Sequence[torch.Tensor], optimizers: Iterable[Optimizer], size: int
) -> Steps[torch.Tensor]:
    """Average in place all of the optimizers' state that is shaped as its parameter.

    A parameter that some rank has no state for, because it was never used there, keeps each rank's own.
    """
    states = [list(_states(parameter, optimizers)) for parameter in parameters]
    own = torch.tensor([[len(found), len(found) ** 2] for found in states], device=parameters[0].device)
    counts = (yield AllReduce(own)).tolist()
    # All ranks have the same number just where the mean of squares is the square of the mean.
    equal = [size * squares == total**2 for total, squares in counts]
    common = [state for found, alike in zip(states, equal, strict=True) if alike for state in found]
    for dtype in dict.fromkeys(state.dtype for state in common):
        alike = [state for state in common if state.dtype == dtype]
        flat = yield AllReduce(pack(alike).mul_(1 / size))
        for state, mean in zip(alike, unpack(flat, [one.shape for one in alike]), strict=True):
            state.copy_(mean)
    return own


def reset_states(parameters: Iterable[torch.Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Forget the optimizers' state of some parameters."""
    for parameter in parameters:
        for optimizer in optimizers:
            optimizer.state.pop(parameter, None)


def _states(parameter: torch.Tensor, optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):
            value = state[key]
            numbers = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if numbers and value.shape == parameter.shape and key != "step":
                yield value
