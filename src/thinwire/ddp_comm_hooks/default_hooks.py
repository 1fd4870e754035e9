"""The names of `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`, on thinwire's engine.

What differs from torch's: a state of None means the DDP model's own process group; fp16 divides before it
casts, so averages that fit do not overflow; the bf16 hooks run on CPU with Gloo.
"""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs.cast import Cast
from thinwire.ddp_comm_hooks._run import run_program
from thinwire.programs.allreduce import BF16, FP16, Exact

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def allreduce_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients exactly, as DDP does without a hook.

    Example::

        ddp.register_comm_hook(None, allreduce_hook)
    """
    return run_program(Exact(), process_group, bucket)


def fp16_compress_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients that travel as float16: half the bytes of fp32, overflow above 65504.

    Example::

        ddp.register_comm_hook(None, fp16_compress_hook)
    """
    return run_program(FP16(), process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients that travel as bfloat16: half the bytes of fp32, and its whole range.

    Example::

        ddp.register_comm_hook(None, bf16_compress_hook)
    """
    return run_program(BF16(), process_group, bucket)


# DDP refuses any hook of that __name__ where CUDA is absent, although Gloo carries bf16.
bf16_compress_hook.__name__ = "thinwire_bf16_compress_hook"


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Give a hook its gradients as float16, and cast what it returns back.

    `hook` may be thinwire's, torch's or yours. Wrapped around `allreduce_hook` it is `fp16_compress_hook`.

    Example::

        ddp.register_comm_hook(None, fp16_compress_wrapper(allreduce_hook))
    """
    return fp16_compress_hook if hook is allreduce_hook else _casting(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Give a hook its gradients as bfloat16, and cast what it returns back.

    `hook` may be thinwire's, torch's or yours. Wrapped around `allreduce_hook` it is `bf16_compress_hook`.

    Example::

        ddp.register_comm_hook(None, bf16_compress_wrapper(allreduce_hook))
    """
    return bf16_compress_hook if hook is allreduce_hook else _casting(hook, torch.bfloat16)


def _casting(hook: Hook, dtype: torch.dtype) -> Hook:
    codec = Cast(dtype)

    def casting_hook(hook_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        full = bucket.buffer()
        (encoded,) = codec.encode(full)
        bucket.set_buffer(encoded)

        # No collective in here, so it does not matter which thread runs it, or when.
        def cast_back(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            return codec.decode((done.value(),), into=full)

        return hook(hook_state, bucket).then(cast_back)

    return casting_hook
