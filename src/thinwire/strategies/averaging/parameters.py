"""Programs that set parameters to their mean over ranks, in place.

    flat = all parameters, one after another;  flat <- sum over ranks of flat / W

Each tensor keeps its memory, strides and dtype, so that views, optimizers and channels_last layouts stay
valid. Parameters of several dtypes are sent in the dtype that all of them promote to.
"""

import zlib
from collections.abc import Sequence

import torch

from thinwire.engine.ops import AllReduce, Collectives
from thinwire.engine.pack import pack, unpack
from thinwire.errors import MismatchError

_PADDED = 512
"""Usage counts are padded to a multiple of this, so that ranks with different counts can be compared."""


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
    yield from average([each for each, count in zip(parameters, users, strict=False) if count], size)


def _fingerprint(parameters: Sequence[torch.Tensor]) -> int:
    """Hash shapes and dtypes to 24 bits, so that the sum of many squares fits into 64."""
    kinds = [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
    return zlib.crc32(repr(kinds).encode()) & 0xFFFFFF
