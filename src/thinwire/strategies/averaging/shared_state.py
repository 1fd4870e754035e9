"""Programs that synchronise the model's buffers and the optimizer's state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from thinwire.engine.ops import AllReduce, Broadcast, Collectives
from thinwire.engine.pack import local_part, pack, unpack

_STEP = "step"
"""The key of torch's step counts, which have the same shape as a parameter without dimensions."""


def share_buffers(buffers: Sequence[torch.Tensor], how: str, size: int) -> Collectives[torch.Tensor]:
    """Make buffers equal on all ranks, in place.

    Args:
        buffers: The model's buffers.
        how: "mean" averages floating-point and complex buffers. All others are copied from the first rank.
        size: The number of ranks.
    """
    done = _nothing()
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = pack(alike)
        if how == "mean" and (dtype.is_floating_point or dtype.is_complex):
            # In double precision, so that the mean of equal numbers is that number.
            precise = flat.to(torch.promote_types(dtype, torch.float64))
            flat = yield AllReduce(precise.mul_(1 / size))
        else:
            flat = yield Broadcast(flat, src=0)
        for buffer, shared in zip(alike, unpack(flat, [held.shape for held in alike]), strict=True):
            buffer.copy_(shared)
    return done


def one_state(
    parameters: Sequence[torch.Tensor], optimizers: Sequence[Optimizer], size: int
) -> Collectives[torch.Tensor]:
    """Make the optimizers' state equal on all ranks, so that equal gradients keep models equal.

    Tensors of their parameter's shape are averaged. All other numbers, such as step counts, are copied from
    the first rank. The state of a parameter is cleared on all ranks if a rank has none, or has state other
    than numbers.
    """
    states = [[optimizer.state.get(parameter, {}) for optimizer in optimizers] for parameter in parameters]
    counts = [sum(map(_count, found)) for found in states]
    equal = yield from _alike(counts, parameters[0].device, size)
    alike = [same and count >= 0 for same, count in zip(equal, counts, strict=True)]
    unlike = [parameter for parameter, same in zip(parameters, alike, strict=True) if not same]
    reset_states(unlike, optimizers)
    others = [
        (state, key)
        for parameter, found, same in zip(parameters, states, alike, strict=True)
        for state in (found if same else ())
        for key in sorted(state, key=str)
        if _counts(state[key], parameter)
    ]
    if others:
        precise = [_precise(state[key]) for state, key in others]
        flat = yield Broadcast(pack(precise).to(parameters[0].device), src=0)
        for (state, key), first in zip(
            others, unpack(flat, [number.shape for number in precise]), strict=True
        ):
            value = state[key]
            state[key] = value.copy_(first) if isinstance(value, torch.Tensor) else type(value)(first.item())
    return (yield from mean_of_states(parameters, optimizers, size))


def mean_of_states(
    parameters: Sequence[torch.Tensor], optimizers: Iterable[Optimizer], size: int
) -> Collectives[torch.Tensor]:
    """Average the optimizers' state tensors of their parameter's shape, in place.

    A parameter without state on some rank, where it was never used, keeps each rank's own state.
    """
    states = [list(_states(parameter, optimizers)) for parameter in parameters]
    equal = yield from _alike([len(found) for found in states], parameters[0].device, size)
    common = [state for found, alike in zip(states, equal, strict=True) if alike for state in found]
    for dtype in dict.fromkeys(state.dtype for state in common):
        alike = [state for state in common if state.dtype == dtype]
        flat = yield AllReduce(pack(alike).mul_(1 / size))
        for state, mean in zip(alike, unpack(flat, [held.shape for held in alike]), strict=True):
            state.copy_(mean)
    return _nothing()


def _alike(counts: Sequence[int], device: torch.device, size: int) -> Collectives[list[bool]]:
    """Return whether each of these numbers is equal on all ranks, that is, has no variance."""
    pairs = [[count, count**2] for count in counts]
    sums = yield AllReduce(torch.tensor(pairs, dtype=torch.int64, device=device))
    return [size * squares == total**2 for total, squares in sums.tolist()]


def _precise(value: torch.Tensor | float) -> torch.Tensor:
    """Return a number or a tensor in double precision, on its own device."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64)
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _nothing() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.float32, device="cpu")


def reset_states(parameters: Iterable[torch.Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Remove the optimizers' state of some parameters."""
    for parameter in parameters:
        for optimizer in optimizers:
            optimizer.state.pop(parameter, None)


def _states(parameter: torch.Tensor, optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the elementwise state tensors of a parameter."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):
            value = state[key]
            numbers = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if numbers and value.shape == parameter.shape and key != _STEP:
                yield local_part(value)


def _count(state: Mapping[str, object]) -> int:
    """Return the number of entries, as a negative number if some are neither tensors nor numbers."""
    known = all(value is None or isinstance(value, torch.Tensor | int | float) for value in state.values())
    return len(state) if known else -(1 << 20)


def _counts(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a value is numeric but not elementwise, such as a step count."""
    if isinstance(value, torch.Tensor):
        numbers = value.is_floating_point() or value.is_complex()
        return value.shape != parameter.shape or value.dim() == 0 or not numbers
    return isinstance(value, int | float) and not isinstance(value, bool)
