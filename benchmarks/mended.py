"""torch's quantization hooks, repaired so that they run on Gloo and can be compared with.

In torch 2.13 they expect the future of an all-gather to hold a list of lists. Gloo's future holds the list
itself, so their first index selects one rank's tensor and the next raises IndexError. The repaired hooks use
a replacement of `torch.distributed` whose all-gather wraps the list once more. Their own code is unchanged.
They start their second all-gather from a callback, in an order that differs between ranks. Give them one
bucket for this reason.
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
        # The hook indexes the gathered scales as one tensor with one row per rank.
        return [torch.stack(value) if value[0].is_floating_point() else value]

    return SimpleNamespace(get_future=lambda: work.get_future().then(nested))


def mend() -> Any:
    """Repair torch's module in place and return it. Its hooks then run on Gloo with one bucket."""
    stand_in = SimpleNamespace(all_gather=_all_gather, group=dist.group, get_rank=dist.get_rank)
    theirs.dist = stand_in  # type: ignore[assignment]
    return theirs
