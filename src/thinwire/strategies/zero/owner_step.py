"""The step of an owner: some of an optimizer's parameters, their gradients, the norm, and changes to them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.engine.ops import AllGather, Collectives
from thinwire.engine.pack import real_numbers
from thinwire.errors import UnavailableError
from thinwire.step.autograd import no_step_hooks, version_of


def step_some(optimizer: Optimizer, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Step only these parameters with these gradients and the groups' current options.

    The state is the optimizer's own. Hooks belong to the user's own calls of `step()`, so none runs here.
    `.grad` is left as it was.

    Args:
        optimizer: The user's optimizer.
        gradients: Pairs of a parameter and its gradient.

    Raises:
        UnavailableError: The optimizer counts steps in its groups or attributes, and would count each bucket.
    """
    chosen = {id(parameter) for parameter, _ in gradients}
    split = [
        [parameter for parameter in group["params"] if id(parameter) in chosen]
        for group in optimizer.param_groups
    ]
    given = [
        {**group, "params": params}
        for group, params in zip(optimizer.param_groups, split, strict=True)
        if params
    ]
    # A second optimizer object with narrowed groups, which shares the first one's state and options. Its
    # constructor must not run: it would make new state, and may take other arguments.
    inner = object.__new__(type(optimizer))
    vars(inner).update(vars(optimizer), param_groups=[dict(group) for group in given])
    vars(inner).update(no_step_hooks())
    own = dict(vars(inner))
    before = [(parameter, parameter.grad) for parameter, _ in gradients]
    try:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        type(optimizer).step(inner)  # not the instance's, which an LR scheduler replaces
    finally:
        for parameter, gradient_before in before:
            parameter.grad = gradient_before
    # What step() has rebound on `inner` is lost with it. An optimizer that counts its steps there would count
    # each bucket as a step, so that is an error.
    changed = [key for key, value in vars(inner).items() if own.get(key, inner) is not value]
    changed += [
        key
        for group, stepped in zip(given, inner.param_groups, strict=True)
        for key in _differing(group, stepped)
    ]
    if changed:
        raise UnavailableError(
            f"{type(optimizer).__name__} keeps {changed[0]!r} for all of its parameters and changes it in"
            " step(), so they cannot be stepped bucket by bucket: step after backward, as"
            " ZeRO(interleaved=False) does"
        )


def _differing(group: Mapping[str, Any], stepped: Mapping[str, Any]) -> list[str]:
    """Return the options that a step has changed."""
    plain = (int, float, str, tuple, type(None))
    return [
        key
        for key, value in stepped.items()
        if key not in group
        or (value is not group[key] and not (isinstance(value, plain) and value == group[key]))
    ]


def gradients_in(
    buffer: torch.Tensor, parameters: Sequence[torch.Tensor], *, strided: bool = True
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each parameter with its gradient, a view of a flat buffer.

    Args:
        buffer: The gradients, one after another.
        parameters: Their parameters.
        strided: Whether the buffer is DDP's own, which lays gradients out with their parameters' strides, so
            that a channels_last parameter has a channels_last gradient. Programs see them in logical order.
    """
    numbers = [
        parameter.detach() if buffer.is_complex() else real_numbers(parameter) for parameter in parameters
    ]
    found, start = [], 0
    for parameter, like in zip(parameters, numbers, strict=True):
        piece = buffer[start : start + like.numel()]
        dense = strided and torch.empty_like(like, device="meta").stride() == like.stride()
        view = (
            piece.as_strided(like.shape, like.stride(), piece.storage_offset())
            if dense
            else piece.view(like.shape)
        )
        pairs = parameter.is_complex() and not buffer.is_complex()
        found.append((parameter, torch.view_as_complex(view) if pairs else view))
        start += like.numel()
    return found


def norm_of(gradients: Iterable[torch.Tensor], kind: float) -> torch.Tensor:
    """Return the total norm of this rank's own gradients."""
    held = [gradient.detach() for gradient in gradients if gradient.numel()]
    norms = [torch.linalg.vector_norm(gradient, kind).float() for gradient in held]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
    return total


def total_norm(own: torch.Tensor, kind: float) -> Collectives[torch.Tensor]:
    """Return the total norm of all ranks' gradients, given each rank's own."""
    norms = yield AllGather(own.reshape(1))
    total: torch.Tensor = torch.linalg.vector_norm(norms.flatten(), kind)
    return total


class Versions:
    """Addresses and version counters of gradients, to detect later changes.

    torch counts every in-place change of a tensor, except those through `.data` and those of
    `GradScaler.unscale_`, which are the same on all ranks.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] | None = None

    def remember(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Record the gradients as they are now."""
        self._before = _versions(gradients)

    def changed(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a gradient was changed, replaced or added since `remember`. Forget the record."""
        before, self._before = self._before, None
        return before is not None and not _versions(gradients).items() <= before.items()


def _versions(gradients: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (gradient.data_ptr(), version_of(gradient)) for name, gradient in gradients.items()}
