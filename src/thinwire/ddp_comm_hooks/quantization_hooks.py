"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks`.

Differences from torch:

- The exchange is two-shot, so a rank sends 2 (W-1)/W encoded copies instead of W-1.
- The mean is quantised a second time before it is sent back. Blocks are smaller to compensate for this, and
    scales are sent with them. The error is at most half a quantisation step of the block, twice. torch's
    error is half a step of the whole bucket (per channel: of a block eight times as large), once.
- A state of None means the DDP model's own process group.
- Half-precision gradients keep their dtype.

Like torch's, these hooks have no error feedback. `thinwire.attach(ddp, thinwire.Int8())` has it.
"""

# DDP inspects a hook's annotations and rejects strings: no `from __future__ import annotations` here.

import torch
import torch.distributed as dist

from thinwire.codecs.checks import check_whole
from thinwire.codecs.quantize import Quantize
from thinwire.ddp_comm_hooks._hook import for_ddp, run_program
from thinwire.programs.twoshot import TwoShot


class _Quantized(TwoShot):
    """A `TwoShot` that encodes on one rank too, as torch's hooks do."""

    exact_alone = False


@for_ddp
def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as 8-bit integers in blocks of 64, each with its own scale.

    Args:
        process_group: Group to average over. None is the DDP model's own.
        bucket: Gradients, passed by DDP.

    Returns:
        A future of the averaged gradients.

    Example::

        ddp.register_comm_hook(None, quantization_pertensor_hook)
    """
    return run_program(_Quantized(Quantize(bits=8, block=64)), process_group, bucket)


@for_ddp
def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as 8-bit integers in blocks of `bucket_size` / 8, each with its own scale.

    Args:
        process_group: Group to average over. None is the DDP model's own.
        bucket: Gradients, passed by DDP.
        bucket_size: Numbers in eight blocks.

    Returns:
        A future of the averaged gradients.

    Raises:
        OptionError: If `bucket_size` is not a positive integer.

    Example::

        ddp.register_comm_hook(None, quantization_perchannel_hook)
    """
    check_whole("bucket_size", bucket_size, 1, "torch's is 512")
    block = min(max(1, bucket_size // 8), 1 << 20)
    return run_program(_Quantized(Quantize(bits=8, block=block)), process_group, bucket)
