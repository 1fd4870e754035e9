"""Parameters become their mean over the ranks, in place, as programs.

    flat = all parameters, one after another;  flat <- sum over ranks of flat / W

Each tensor keeps its memory, strides and dtype, so views of it, optimizers and channels_last layouts do not
notice. Parameters of several dtypes travel in the one that holds them all.
"""

from collections.abc import Sequence

import torch

from thinwire.wire.ops import AllReduce, Steps
from thinwire.wire.pack import pack, unpack


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
    used = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.int32,
        device=parameters[0].device,
    )
    used = yield AllReduce(used)
    agreed = zip(parameters, used.tolist(), strict=True)
    yield from average([parameter for parameter, ranks in agreed if ranks], size)
