"""The name of `torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks`."""

from typing import Any

import torch
from torch.distributed import GradBucket

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send nothing: every rank keeps its own gradients, so replicas part ways.

    For one question only: how fast would training be if communication cost nothing? If a step is hardly
    faster with this hook, the network is not the bottleneck, and no compression will help.

    Example::

        ddp.register_comm_hook(None, noop_hook)
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
