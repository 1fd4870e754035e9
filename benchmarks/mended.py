"""torch's quantization hooks, mended so that they run on Gloo at all and can be compared with.

In torch 2.13 they expect the future of an all-gather to hold a list of lists, while Gloo's holds the list
itself, so that their first index picks one rank's tensor and the next raises IndexError. The mended ones see
`torch.distributed` through a stand-in whose all-gather wraps the list once more; no line of theirs changes.
They start their second all-gather from a callback, in an order that differs from rank to rank: give them one
bucket.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
    work = dist.all_gather(outputs, tensor, group=group, async_op=async_op)
    assert work is not None

    def nested(done: Any) -> list[Any]:
        value = done.value()
        # The hook stacks the gathered scales of one rank per row, and indexes them as one tensor.
        return [torch.stack(value) if value[0].is_floating_point() else value]

    return SimpleNamespace(get_future=lambda: work.get_future().then(nested))


def mend() -> Any:
    """Torch's module, whose hooks now run on Gloo with one bucket."""
    stand_in = SimpleNamespace(all_gather=_all_gather, group=dist.group, get_rank=dist.get_rank)
    theirs.dist = stand_in  # type: ignore[assignment]
    return theirs
