"""The names of `torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks`, on the two-shot exchange.

What differs from torch's: a rank sends 2 (W-1)/W encoded copies instead of W-1. The mean is quantised once
more on its way back, so blocks are smaller, and scales travel with them: a number is off by at most half a
step of its block, twice, where torch's is off by half a step of the whole bucket (per channel: of a block
eight times as large), once. A state of None means the DDP model's own process group. Gradients of half
precision stay what they are. Neither has error feedback: `thinwire.attach(ddp, thinwire.Int8())` has.
"""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import torch
import torch.distributed as dist

from thinwire.codecs.quantize import Quantize
from thinwire.ddp_comm_hooks._run import run_program
from thinwire.errors import OptionError
from thinwire.programs.twoshot import TwoShot


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients that travel as 8-bit whole numbers, in blocks of 64 with a scale of their own.

    Example::

        ddp.register_comm_hook(None, quantization_pertensor_hook)
    """
    return run_program(TwoShot(Quantize(bits=8, block=64)), process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients that travel as 8-bit whole numbers, eight blocks to `bucket_size`.

    Example::

        ddp.register_comm_hook(None, quantization_perchannel_hook)
    """
    if not isinstance(bucket_size, int) or isinstance(bucket_size, bool) or bucket_size < 1:
        raise OptionError(f"bucket_size={bucket_size!r} must be a whole number, at least 1: torch's is 512")
    block = min(max(1, bucket_size // 8), 1 << 20)
    return run_program(TwoShot(Quantize(bits=8, block=block)), process_group, bucket)
