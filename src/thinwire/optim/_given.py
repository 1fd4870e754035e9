"""Validation of the arguments of ZeroRedundancyOptimizer."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from thinwire.checkpoint.optimizer_state import options_of
from thinwire.engine.comm.process_group import group_or_world, outside
from thinwire.errors import OptionError


def listed(params: Any) -> list[Any]:
    """Return parameters or groups as a list.

    Raises:
        OptionError: If there are none, a group has no 'params', or a parameter is not dense.
        TypeError: If they are not an iterable of parameters or of groups, as in torch.
    """
    if isinstance(params, torch.Tensor | set) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {torch.typename(params)}: pass an ordered iterable of parameters, such as"
            " model.parameters(), or of parameter groups"
        )
    items = list(params)
    if not items:
        raise OptionError(
            "params is empty, so there is nothing to optimize; a generator gives its items once"
        )
    kinds = {_kind(each) for each in items}
    if len(kinds) > 1 or None in kinds:
        found = ", ".join(sorted({torch.typename(each) for each in items}))
        raise TypeError(f"params has items of {found}: pass parameters only, or groups (dicts) only")
    for group in items:
        if isinstance(group, dict) and "params" not in group:
            raise OptionError(f"a group has the keys {sorted(group)}: it needs 'params', its parameters")
        if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor | set):
            group["params"] = list(group["params"])  # torch raises on sets, whose order differs by rank
    for tensor in _tensors_in(items):
        if tensor.layout != torch.strided:
            raise OptionError(
                f"a parameter is {tensor.layout}: only dense parameters can be sent to other ranks"
            )
    return items


def _kind(item: object) -> type | None:
    if isinstance(item, tuple):
        return tuple if len(item) == 2 and isinstance(item[1], torch.Tensor) else None
    return next((kind for kind in (torch.Tensor, dict) if isinstance(item, kind)), None)


def _tensors_in(items: list[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        inner = item["params"] if isinstance(item, dict) else item
        several = [inner] if isinstance(inner, torch.Tensor) else inner
        yield from (each for each in several if isinstance(each, torch.Tensor))


def group_given(process_group: Any | None) -> dist.ProcessGroup:
    """Return the given group, or the whole world for None. Raise OptionError if this rank is not in it."""
    group = group_or_world(process_group)
    if outside(group):
        raise OptionError(
            f"process_group={group!r} must be a process group that this rank is in, or None for the"
            " whole world"
        )
    return group


def local_optimizer(
    optimizer_class: Any, groups: list[dict[str, Any]], defaults: dict[str, Any]
) -> Optimizer:
    """Return a new local optimizer. Groups may have no parameters, which torch's optimizers accept."""
    known = optimizer_class if isinstance(optimizer_class, type) else Optimizer
    if not callable(optimizer_class) or not issubclass(known, Optimizer):
        raise OptionError(
            f"optimizer_class={optimizer_class!r} must be a subclass of torch.optim.Optimizer, such as"
            " torch.optim.AdamW"
        )
    made = optimizer_class(groups, **defaults)
    if not isinstance(made, Optimizer):
        raise OptionError(
            f"optimizer_class={optimizer_class!r} made a {type(made).__name__}, no torch.optim.Optimizer"
        )
    return made


def described(
    optim: Optimizer, groups: list[dict[str, Any]], sent: set[int], strided: bool
) -> dict[str, str]:
    """Describe an optimizer and its parameters as text, for comparison between ranks.

    Args:
        optim: The local optimizer.
        groups: Parameter groups of all ranks.
        sent: Indices of the parameters that are sent.
        strided: Whether strides must be equal too.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {
        "optimizer": f"{type(optim).__module__}.{type(optim).__qualname__}",
        **{
            f"{key} of group {number}": repr(value)
            for number, group in enumerate(groups)
            for key, value in options_of(group).items()
            if isinstance(value, bool | int | float | str | tuple | None)
        },
        **{
            f"parameter {index}": f"{tuple(each.shape)} {each.dtype}"
            + (f" strides {each.stride()}" if strided else "")
            + ("" if index in sent else " frozen")
            for index, each in enumerate(parameters)
        },
    }
