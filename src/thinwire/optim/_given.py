"""What a user gives to ZeroRedundancyOptimizer: checked, and in one form."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from thinwire.errors import OptionError
from thinwire.sharding.state import options_of


def listed(params: Any) -> list[Any]:
    """Parameters, or groups of them, in a list; what torch refuses is refused with the same classes."""
    if isinstance(params, torch.Tensor | set) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {torch.typename(params)}: give an ordered iterable of parameters, such as"
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
        raise TypeError(f"params has items of {found}: give parameters only, or groups (dicts) only")
    for group in items:
        if isinstance(group, dict) and "params" not in group:
            raise OptionError(f"a group has the keys {sorted(group)}: it needs 'params', its parameters")
        if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor | set):
            group["params"] = list(group["params"])  # sets, whose order differs by rank, torch refuses
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
    """The given group, or the whole world for None; this rank must be in it."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise OptionError(
            "process_group=None means the whole world, and there is none yet: call"
            " torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"process_group={group!r} must be a process group that this rank is in, or None for the"
            " whole world"
        )
    return group


def local_optimizer(
    optimizer_class: Any, groups: list[dict[str, Any]], defaults: dict[str, Any]
) -> Optimizer:
    """The local optimizer; groups may be empty lists, which torch's optimizers accept, in dicts."""
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
    """An optimizer and all its parameters as text, to be equal on every rank.

    `sent` are the numbers of those that travel; as they lie in memory if `strided`.
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
