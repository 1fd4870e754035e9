"""The names of `torch.distributed.algorithms.model_averaging.utils`.

What differs from torch's: parameters are averaged in place, so views, memory formats and optimizers keep
hold of them; which have gradients is agreed between ranks first, so a parameter that some rank did not use
is no trouble; and with nothing to average, nothing happens.
"""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed import ProcessGroup

from thinwire.averaging.parameters import average, average_used
from thinwire.errors import OptionError
from thinwire.model_averaging._groups import group_or_world, outside
from thinwire.wire.blocking import run_blocking

__all__ = [
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]


class ParametersError(OptionError, NotImplementedError):
    """Neither parameters nor parameter groups; torch's is a NotImplementedError."""


def average_parameters(params: Iterator[torch.nn.Parameter], process_group: ProcessGroup) -> None:
    """Average all given parameters over a group, in place; a rank outside the group does nothing.

    Every rank must give as many, of the same shapes. The copy that travels takes as much memory as they do.

    Args:
        params: Any iterable of them.
        process_group: Over which to average; None: the whole world.

    Example::

        average_parameters(model.parameters(), None)
    """
    group = group_or_world(process_group)
    if not outside(group):
        run_blocking(average(list(params), group.size()), group)


def get_params_to_average(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]],
) -> list[torch.nn.Parameter]:
    """Those parameters that have a gradient on this rank, in order.

    Args:
        params: A model's parameters, or an optimizer's `param_groups`.

    Example::

        get_params_to_average(optimizer.param_groups)
    """
    return [param for param in _flat(params) if param.grad is not None]


def average_parameters_or_parameter_groups(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]],
    process_group: ProcessGroup,
) -> None:
    """Average, in place, those parameters that have a gradient on any rank of a group.

    Args:
        params: A model's parameters, or an optimizer's `param_groups`: all of them, the same on every rank.
        process_group: Over which to average; None: the whole world. A rank outside it does nothing.

    Example::

        average_parameters_or_parameter_groups(optimizer.param_groups, None)
    """
    parameters, group = _flat(params), group_or_world(process_group)
    if not outside(group):
        run_blocking(average_used(parameters, group.size()), group)


def _flat(params: Iterable[object]) -> list[torch.nn.Parameter]:
    flat: list[torch.nn.Parameter] = []
    for param in params:
        if isinstance(param, torch.nn.Parameter):
            flat.append(param)
        elif isinstance(param, dict):
            flat.extend(param["params"])
        else:
            raise ParametersError(
                f"params has a {type(param).__name__} in it: give model.parameters() or an optimizer's"
                " param_groups"
            )
    return flat
