"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks`."""

from typing import Any

import torch
from torch.distributed import GradBucket

from thinwire.ddp_comm_hooks._hook import for_ddp

__all__ = ["noop_hook"]


@for_ddp
def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the rank's own gradients without communication, so replicas diverge.

    Use it only to measure how fast training would be if communication cost nothing. If a step is hardly
    faster with this hook, the network is not the bottleneck, and no compression will help.

    Args:
        _: Ignored.
        bucket: Gradients, passed by DDP.

    Returns:
        A future of the unchanged gradients.

    Example::

        ddp.register_comm_hook(None, noop_hook)
    """
    if isinstance(bucket, tuple):  # from compiled autograd's Python reducer
        return bucket[0]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
