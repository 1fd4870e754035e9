"""Drop-in replacement for `torch.distributed.algorithms.model_averaging.utils`.

Differences from torch:

- Parameters are averaged in place, so views, memory formats and references of optimizers stay valid.
- Ranks agree first on which parameters have gradients, so a parameter may be unused on some ranks.
- With nothing to average, nothing is sent.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from thinwire.engine.comm.borrowed_group import run_blocking
from thinwire.engine.comm.process_group import group_or_world, outside
from thinwire.engine.ops import AllReduce, Collectives
from thinwire.engine.pack import pack, unpack
from thinwire.errors import MismatchError, OptionError

__all__ = [
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]

_PADDED = 512
"""Usage counts are padded to a multiple of this, so that ranks with different counts can be compared."""


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


def average(parameters: Sequence[torch.Tensor], size: int) -> Collectives[None]:
    """Average parameters over `size` ranks, in place. All ranks must give the same number and shapes.

    >>> from thinwire.engine.simulate import simulate
    >>> ranks = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])]]
    >>> _ = simulate([[average(own, 2)] for own in ranks])
    >>> ranks[1]
    [tensor([2., 3.])]
    """
    if size == 1 or not parameters:
        return
    flat = pack([parameter.detach() for parameter in parameters])
    flat /= size  # before the sum, so that the sum does not overflow
    flat = yield AllReduce(flat)
    means = unpack(flat, [parameter.shape for parameter in parameters])
    with torch.no_grad():
        for parameter, mean in zip(parameters, means, strict=True):
            only_real = mean.is_complex() and not parameter.is_complex()
            parameter.copy_(mean.real if only_real else mean)


def average_used(parameters: Sequence[torch.Tensor], size: int) -> Collectives[None]:
    """Average the parameters that have a gradient on any rank, in place.

    Ranks without a gradient contribute their parameter's value. Ranks first agree on the parameters in use,
    so that all of them send the same number of bytes. On an accelerator the host waits for that small sum, on
    the current stream only.

    Raises:
        MismatchError: Ranks have different numbers, shapes or dtypes of parameters.
    """
    if size == 1 or not parameters:
        return
    own = _fingerprint(parameters)
    used = [int(parameter.grad is not None) for parameter in parameters]
    padding = [0] * (-(len(used) + 2) % _PADDED)
    counts = [own, own * own, *used, *padding]
    sums = yield AllReduce(torch.tensor(counts, dtype=torch.int64, device=parameters[0].device))
    total, squares, *users = sums.tolist()
    if size * squares != total * total:  # the variance, 0 only if all ranks have the same
        raise MismatchError(
            f"this rank would average {len(used)} parameters, {sum(used)} of them with gradients, and others"
            " have a different number, or other shapes or dtypes: pass all of a model's parameters, in the"
            " same order on every rank"
        )
    yield from average(
        [parameter for parameter, count in zip(parameters, users, strict=False) if count], size
    )


def _fingerprint(parameters: Sequence[torch.Tensor]) -> int:
    """Hash shapes and dtypes to 24 bits, so that the sum of many squares fits into 64."""
    kinds = [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
    return zlib.crc32(repr(kinds).encode()) & 0xFFFFFF
