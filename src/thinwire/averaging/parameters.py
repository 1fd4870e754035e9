"""Parameters become their mean over the ranks, in place, as programs.

    flat = all parameters, one after another;  flat <- sum over ranks of flat / W

Each tensor keeps its memory, strides and dtype, so views of it, optimizers and channels_last layouts do not
notice. Parameters of several dtypes travel in the one that holds them all.
"""

import zlib
from collections.abc import Sequence

import torch

from thinwire.errors import MismatchError
from thinwire.wire.ops import AllReduce, Steps
from thinwire.wire.pack import pack, unpack

_ROOM = 512
"""What ranks agree by has a multiple of this many numbers, so that also unequal ranks can talk."""


def average(parameters: Sequence[torch.Tensor], size: int) -> Steps[None]:
    """Average all of them over `size` ranks; every rank must give as many, of the same shapes.

    >>> from thinwire.wire.simulate import simulate
    >>> ranks = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])]]
    >>> _ = simulate([[average(own, 2)] for own in ranks])
    >>> ranks[1]
    [tensor([2., 3.])]
    """
    if size == 1 or not parameters:
        return
    flat = pack([parameter.detach() for parameter in parameters])
    flat /= size  # before the sum, which so overflows no sooner than the mean
    flat = yield AllReduce(flat)
    means = unpack(flat, [parameter.shape for parameter in parameters])
    with torch.no_grad():
        for parameter, mean in zip(parameters, means, strict=True):
            only_real = mean.is_complex() and not parameter.is_complex()
            parameter.copy_(mean.real if only_real else mean)


def average_used(parameters: Sequence[torch.Tensor], size: int) -> Steps[None]:
    """Average those that have a gradient on any rank; ranks on which one has none contribute its value.

    Which these are is agreed first, since only then do all ranks send as much. (On an accelerator the host
    waits for that small sum, on the current stream only.)
    """
    if size == 1 or not parameters:
        return
    own = _fingerprint(parameters)
    used = [int(parameter.grad is not None) for parameter in parameters]
    room = [0] * (-(len(used) + 2) % _ROOM)
    sums = yield AllReduce(torch.tensor([own, own * own, *used, *room], device=parameters[0].device))
    total, squares, *users = sums.tolist()
    if size * squares != total * total:  # the variance, which is 0 just where all ranks have the same
        raise MismatchError(
            f"this rank would average {len(used)} parameters, {sum(used)} of them with gradients, and others"
            " have a different number, or other shapes or dtypes: give all of a model's parameters, in the"
            " same order on every rank"
        )
    yield from average([each for each, count in zip(parameters, users, strict=False) if count], size)


def _fingerprint(parameters: Sequence[torch.Tensor]) -> int:
    """24 bits, so that the sum of many squares is still a whole number of 64."""
    kinds = [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
    return zlib.crc32(repr(kinds).encode()) & 0xFFFFFF
