"""Hooks under compiled autograd's Python reducer, which dynamo traces.

DDP calls a hook with (gradient, parameter) instead of a bucket. It ignores the returned value and uses the
gradient that the hook has overwritten. A hook of one collective works there. Hooks that need a bucket, memory
or the engine do not.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist

from thinwire.ddp_comm_hooks._hook import living_models, owner_of_parameter
from thinwire.engine.pack import real_numbers
from thinwire.errors import UnavailableError
from thinwire.models.ddp.internals import mark_constant, traced_sum, uses_python_reducer


def average_gradient(
    given: tuple[torch.Tensor, torch.Tensor], process_group: Any, dtype: torch.dtype | None = None
) -> Any:
    """Average a gradient over the group, in place.

    The arithmetic is that of `Exact` and `Reduced`: divide, cast, sum.

    Args:
        given: The gradient and its parameter, as the Python reducer passes them.
        process_group: Group to average over. None is the group of the parameter's DDP model.
        dtype: Dtype that is sent. None sends the gradient's own.

    Returns:
        The same gradient.
    """
    gradient, parameter = given
    if process_group is not None:
        group, size = process_group, process_group.size()
    elif torch.compiler.is_compiling():
        group, size = _only_group()
    else:
        group = owner_of_parameter(parameter).process_group
        size = group.size()
    numbers = real_numbers(gradient)
    scaled = numbers * (1 / size)
    mean = traced_sum(scaled if dtype is None else scaled.to(dtype), group)
    numbers.copy_(mean)
    return gradient


def _only_group() -> tuple[str, int]:
    """Return name and size of the one group that models with the Python reducer use.

    While dynamo traces a hook, the parameter is a symbol, so the model that owns it cannot be found.
    """
    groups = _living_groups()
    if len(groups) != 1:
        gc.collect()  # a dropped model may not be collected yet
        groups = _living_groups()
    if len(groups) != 1:
        raise UnavailableError(
            f"DDP models that use compiled autograd's Python reducer span {len(groups)} process groups, so"
            " the group to average over is unclear: pass it as the hook's state, as in"
            " ddp.register_comm_hook(ddp.process_group, hook)"
        )
    (group,) = groups
    return group.group_name, group.size()


def _living_groups() -> set[dist.ProcessGroup]:
    return {model.process_group for model in living_models() if uses_python_reducer(model)}


mark_constant(_only_group)
