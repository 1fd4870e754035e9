"""What is averaged beside the parameters: the model's buffers and the optimizer's state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from thinwire.wire.ops import AllReduce, Broadcast, Steps
from thinwire.wire.pack import pack, unpack

_STEP = "step"
"""What torch's optimizers call their count; of a parameter without dimensions it has the same shape."""


def share_buffers(buffers: Sequence[torch.Tensor], how: str, size: int) -> Steps[torch.Tensor]:
    """Make buffers equal in place: their mean over ranks, where that makes sense, or the first rank's."""
    done = torch.zeros(0)
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = pack(alike)
        if how == "mean" and (dtype.is_floating_point or dtype.is_complex):
            # In double precision: the mean of equal numbers is then that number.
            precise = flat.to(torch.promote_types(dtype, torch.float64))
            flat = yield AllReduce(precise.mul_(1 / size))
        else:
            flat = yield Broadcast(flat, src=0)
        for buffer, shared in zip(alike, unpack(flat, [one.shape for one in alike]), strict=True):
            buffer.copy_(shared)
    return done


def one_state(
    parameters: Sequence[torch.Tensor], optimizers: Sequence[Optimizer], size: int
) -> Steps[torch.Tensor]:
    """Make all of the optimizers' state equal, so that equal gradients keep models equal from here on.

    Means of what is shaped as its parameter; of all other numbers, such as counts of steps, the first rank's.
    A parameter that some rank has no state for, or one that is not made of numbers, starts anew everywhere.
    """
    states = [[one.state.get(parameter, {}) for one in optimizers] for parameter in parameters]
    counts = [sum(map(_count, found)) for found in states]
    equal = yield from _alike(counts, parameters[0].device, size)
    alike = [same and count >= 0 for same, count in zip(equal, counts, strict=True)]
    reset_states([one for one, same in zip(parameters, alike, strict=True) if not same], optimizers)
    others = [
        (state, key)
        for parameter, found, same in zip(parameters, states, alike, strict=True)
        for state in (found if same else ())
        for key in sorted(state, key=str)
        if _counts(state[key], parameter)
    ]
    if others:
        precise = [torch.as_tensor(state[key], dtype=torch.float64) for state, key in others]
        flat = yield Broadcast(pack(precise).to(parameters[0].device), src=0)
        for (state, key), first in zip(others, unpack(flat, [one.shape for one in precise]), strict=True):
            value = state[key]
            state[key] = value.copy_(first) if isinstance(value, torch.Tensor) else type(value)(first.item())
    return (yield from mean_of_states(parameters, optimizers, size))


def mean_of_states(
    parameters: Sequence[torch.Tensor], optimizers: Iterable[Optimizer], size: int
) -> Steps[torch.Tensor]:
    """Average in place all of the optimizers' state that is shaped as its parameter.

    A parameter that some rank has no state for, because it was never used there, keeps each rank's own.
    """
    states = [list(_states(parameter, optimizers)) for parameter in parameters]
    equal = yield from _alike([len(found) for found in states], parameters[0].device, size)
    common = [state for found, alike in zip(states, equal, strict=True) if alike for state in found]
    for dtype in dict.fromkeys(state.dtype for state in common):
        alike = [state for state in common if state.dtype == dtype]
        flat = yield AllReduce(pack(alike).mul_(1 / size))
        for state, mean in zip(alike, unpack(flat, [one.shape for one in alike]), strict=True):
            state.copy_(mean)
    return torch.zeros(0)


def _alike(counts: Sequence[int], device: torch.device, size: int) -> Steps[list[bool]]:
    """Which of these numbers are the same on all ranks: where the mean of squares is the mean's square."""
    sums = yield AllReduce(torch.tensor([[count, count**2] for count in counts], device=device))
    return [size * squares == total**2 for total, squares in sums.tolist()]


def reset_states(parameters: Iterable[torch.Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Forget the optimizers' state of some parameters."""
    for parameter in parameters:
        for optimizer in optimizers:
            optimizer.state.pop(parameter, None)


def _states(parameter: torch.Tensor, optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Tensors that go with each number of a parameter."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):
            value = state[key]
            numbers = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if numbers and value.shape == parameter.shape and key != _STEP:
                yield value


def _count(state: Mapping[str, object]) -> int:
    """How many entries it has; less than none if some are neither tensors nor numbers."""
    known = all(value is None or isinstance(value, torch.Tensor | int | float) for value in state.values())
    return len(state) if known else -(1 << 20)


def _counts(value: object, parameter: torch.Tensor) -> bool:
    """Whether a state is numbers of another kind: counts, statistics of rows."""
    if isinstance(value, torch.Tensor):
        numbers = value.is_floating_point() or value.is_complex()
        return value.shape != parameter.shape or value.dim() == 0 or not numbers
    return isinstance(value, int | float) and not isinstance(value, bool)
