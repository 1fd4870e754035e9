"""Programs that send each owner's updated parameters to all ranks.

One flat broadcast carries many parameters, up to 32 MB, so that buffers stay small. Over all owners,
a rank sends (W-1)/W of the model on average. Parameters are updated in place, so each tensor keeps its memory
and strides. An all-gather of shards would pad all of them to the largest, which one embedding makes most of a
model, and would need the memory of a second model.
"""

from collections.abc import Iterator, Sequence

import torch

from thinwire.engine.ops import Broadcast, Collectives
from thinwire.engine.pack import pack, unpack


def in_turn(
    owned: Sequence[Sequence[Sequence[torch.Tensor]]],
) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    """Yield (owner, batch) with owners in turn, so that batches in flight use different ranks' links."""
    for turn in range(max(map(len, owned), default=0)):
        for owner, batch in enumerate(owned):
            if turn < len(batch):
                yield owner, batch[turn]


def share(tensors: Sequence[torch.Tensor], owner: int, rank: int) -> Collectives[None]:
    """Broadcast one batch of the owner's tensors, in place. A single contiguous tensor needs no copy.

    >>> from thinwire.engine.simulate import simulate
    >>> ranks = [[torch.tensor([1.0]), torch.tensor(2.0)], [torch.zeros(1), torch.tensor(0.0)]]
    >>> _ = simulate([[share(own, owner=0, rank=rank)] for rank, own in enumerate(ranks)])
    >>> ranks[1]
    [tensor([1.]), tensor(2.)]
    """
    own = [tensor.detach() for tensor in tensors]
    if len(own) == 1 and own[0].is_contiguous():
        yield Broadcast(own[0].view(-1), src=owner)
    elif rank == owner:
        yield Broadcast(pack(own), src=owner)
    else:
        flat = yield Broadcast(own[0].new_empty(sum(tensor.numel() for tensor in own)), src=owner)
        for tensor, sent in zip(own, unpack(flat, [tensor.shape for tensor in own]), strict=True):
            tensor.copy_(sent)


def as_views(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make parameters of one dtype and device views of one flat buffer, and return the buffer.

    Strides are kept. The function rebinds each parameter's `.data`, so earlier views keep the old memory and
    no longer follow the parameter.
    """
    flat = parameters[0].detach().new_empty(sum(parameter.numel() for parameter in parameters))
    start = 0
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()  # dense in any case
        view = flat.as_strided(parameter.shape, strides, start)
        view.copy_(parameter.detach())
        parameter.data = view
        start += parameter.numel()
    return flat
