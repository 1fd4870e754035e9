"""Drop-in replacement for `torch.distributed.algorithms.model_averaging.utils`.

Differences from torch:

- Parameters are averaged in place, so views, memory formats and references of optimizers stay valid.
- Ranks agree first on which parameters have gradients, so a parameter may be unused on some ranks.
- With nothing to average, nothing is sent.
"""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed import ProcessGroup

from thinwire.engine.comm.borrowed_group import run_blocking
from thinwire.engine.comm.process_group import group_or_world, outside
from thinwire.errors import OptionError
from thinwire.strategies.averaging.parameters import average, average_used

__all__ = [
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]


class ParametersError(OptionError, NotImplementedError):
    """An OptionError for neither parameters nor parameter groups. torch raises NotImplementedError."""


def average_parameters(params: Iterator[torch.nn.Parameter], process_group: ProcessGroup) -> None:
    """Average all given parameters over a group, in place. A rank outside the group does nothing.

    The copy that is sent takes as much memory as the parameters.

    Args:
        params: Parameters, as many and of the same shapes on every rank.
        process_group: Group to average over. None is the whole world.

    Example::

        average_parameters(model.parameters(), None)
    """
    group = group_or_world(process_group)
    if not outside(group):
        run_blocking(average(list(params), group.size()), group)


def get_params_to_average(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]],
) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient on this rank, in order.

    Args:
        params: A model's parameters or an optimizer's `param_groups`.

    Returns:
        The parameters, those without a gradient left out.

    Example::

        get_params_to_average(optimizer.param_groups)
    """
    return [param for param in _flat(params) if param.grad is not None]


def average_parameters_or_parameter_groups(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, torch.nn.Parameter]],
    process_group: ProcessGroup,
) -> None:
    """Average the parameters that have a gradient on any rank of a group, in place.

    Args:
        params: A model's parameters or an optimizer's `param_groups`, all of them on every rank.
        process_group: Group to average over. None is the whole world. A rank outside it does nothing.

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
                f"params has a {type(param).__name__} in it: pass model.parameters() or an optimizer's"
                " param_groups"
            )
    return flat
