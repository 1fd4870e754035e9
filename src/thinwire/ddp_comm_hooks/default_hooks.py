"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`, on thinwire's engine.

Differences from torch:

- A state of None means the DDP model's own process group.
- fp16 divides before it casts, so averages that fit do not overflow.
- The bf16 hooks run on CPU with Gloo.

The hooks also work under compiled autograd's Python reducer (`optimize_ddp="python_reducer"`), which calls
them for each gradient. If models that use it span several groups, pass the group as the hook's state.
"""

# DDP inspects a hook's annotations and rejects strings: no `from __future__ import annotations` here.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs.cast import Cast
from thinwire.ddp_comm_hooks._hook import for_ddp, run_program
from thinwire.ddp_comm_hooks._python_reducer import average_gradient
from thinwire.models.ddp.model import check_bucket
from thinwire.programs.allreduce import Exact, Reduced

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


class _Casted(Reduced):
    """A `Reduced` that casts on one rank too, as torch's hooks do."""

    exact_alone = False


@for_ddp
def allreduce_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients exactly, as DDP does without a hook.

    Args:
        process_group: Group to average over. None is the DDP model's own.
        bucket: Gradients, passed by DDP.

    Returns:
        A future of the averaged gradients.

    Example::

        ddp.register_comm_hook(None, allreduce_hook)
    """
    if isinstance(bucket, tuple):
        return average_gradient(bucket, process_group)
    return run_program(Exact(), process_group, bucket)


@for_ddp
def fp16_compress_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as float16, which halves the bytes of float32. Means above 65504 overflow.

    Args:
        process_group: Group to average over. None is the DDP model's own.
        bucket: Gradients, passed by DDP.

    Returns:
        A future of the averaged gradients.

    Example::

        ddp.register_comm_hook(None, fp16_compress_hook)
    """
    if isinstance(bucket, tuple):
        return average_gradient(bucket, process_group, torch.float16)
    return run_program(_Casted(Cast(torch.float16)), process_group, bucket)


@for_ddp
def bf16_compress_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as bfloat16, which halves the bytes of float32 and keeps its range.

    Args:
        process_group: Group to average over. None is the DDP model's own.
        bucket: Gradients, passed by DDP.

    Returns:
        A future of the averaged gradients.

    Example::

        ddp.register_comm_hook(None, bf16_compress_hook)
    """
    if isinstance(bucket, tuple):
        return average_gradient(bucket, process_group, torch.bfloat16)
    return run_program(_Casted(Cast(torch.bfloat16)), process_group, bucket)


# Without CUDA, DDP rejects any hook with the original __name__, although Gloo supports bf16.
bf16_compress_hook.__name__ = "thinwire_bf16_compress_hook"


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Wrap a hook so that it receives float16 gradients, and cast its result back.

    Args:
        hook: thinwire's, torch's or your own hook.

    Returns:
        The wrapped hook. For `allreduce_hook` that is `fp16_compress_hook`.

    Example::

        ddp.register_comm_hook(None, fp16_compress_wrapper(allreduce_hook))
    """
    return fp16_compress_hook if hook is allreduce_hook else _casting(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Wrap a hook so that it receives bfloat16 gradients, and cast its result back.

    Args:
        hook: thinwire's, torch's or your own hook.

    Returns:
        The wrapped hook. For `allreduce_hook` that is `bf16_compress_hook`.

    Example::

        ddp.register_comm_hook(None, bf16_compress_wrapper(allreduce_hook))
    """
    return bf16_compress_hook if hook is allreduce_hook else _casting(hook, torch.bfloat16)


def _casting(hook: Hook, dtype: torch.dtype) -> Hook:
    codec = Cast(dtype)

    @for_ddp
    def casting_hook(hook_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        check_bucket(bucket)
        full = bucket.buffer()
        sparse = full.is_sparse  # codecs take dense tensors
        encoded = full.to(dtype) if sparse else codec.encode(full)[0]
        bucket.set_buffer(encoded)

        # It issues no collective, so it may run on any thread at any time.
        def cast_back(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return full.copy_(done.value()) if sparse else codec.decode((done.value(),), into=full)

        return hook(hook_state, bucket).then(cast_back)

    return casting_hook
