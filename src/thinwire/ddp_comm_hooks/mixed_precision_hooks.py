"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks`.

DDP's `mixed_precision=` registers torch's own hook in its constructor and records accelerator events, so it
cannot be used on CPU. This hook is for code that sets up low-precision parameters itself.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs.cast import Cast
from thinwire.ddp_comm_hooks._hook import run_program
from thinwire.models.ddp.internals import (
    free_low_precision,
    is_ignored,
    remove_mixed_precision_hook,
    to_full_precision,
)
from thinwire.models.ddp.model import check_bucket
from thinwire.programs.allreduce import Exact
from thinwire.step.autograd import queue_callback


@dataclass
class _AllreduceUpcastHookState:
    """State of the hook: a weak reference to the model and the stream of upcasts.

    Attributes:
        ddp_weakref: Weak reference to the DDP model, whose `mixed_precision` has the dtypes.
        upcast_stream: Stream on which parameters are cast to full precision. Not used on CPU.
        wait_for_stream_enqueued: True once this backward's final callback is queued.
    """

    ddp_weakref: Any
    upcast_stream: torch.Stream
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in `reduce_dtype`, then restore parameters and gradients to full precision."""
    check_bucket(bucket)
    ddp = hook_state.ddp_weakref()
    full = bucket.buffer()
    reduce_dtype = ddp.mixed_precision.reduce_dtype
    if reduce_dtype not in (None, full.dtype):
        bucket.set_buffer(Cast(reduce_dtype).encode(full)[0])
    future = run_program(Exact(), ddp.process_group, bucket)

    # A parameter's gradient is complete when its bucket arrives, so its low-precision copy is no longer
    # needed. DDP writes the averaged gradient into the full-precision one afterwards.
    on_accelerator = full.device.type != "cpu"
    with hook_state.upcast_stream if on_accelerator else contextlib.nullcontext():
        parameters: list[Any] = bucket.parameters()  # Any: DDP's set-up adds attributes to them
        for parameter in parameters:
            to_full_precision(parameter)
            free_low_precision(parameter)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.to(parameter.data.dtype)
    if not hook_state.wait_for_stream_enqueued:
        hook_state.wait_for_stream_enqueued = True
        queue_callback(lambda: _end_of_backward(hook_state, on_accelerator))
    return future


def _end_of_backward(hook_state: _AllreduceUpcastHookState, on_accelerator: bool) -> None:
    """Join the streams, remove this backward's hooks and upcast parameters without a gradient."""
    if on_accelerator:
        torch.accelerator.current_stream().wait_stream(hook_state.upcast_stream)
    for parameter in hook_state.ddp_weakref().module.parameters():
        remove_mixed_precision_hook(parameter)
        if not parameter.requires_grad and not is_ignored(parameter):
            to_full_precision(parameter)
    hook_state.wait_for_stream_enqueued = False
