"""The names of `torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks`.

DDP's `mixed_precision=` registers torch's own hook in its constructor and records accelerator events, so
on CPU it cannot be used at all. This hook is for code that sets up low-precision parameters itself.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.utils import _free_storage

from thinwire.codecs.cast import Cast
from thinwire.ddp_comm_hooks._run import run_program
from thinwire.programs.allreduce import Exact


@dataclass
class _AllreduceUpcastHookState:
    """The model, weakly held, and the stream on which parameters return to full precision.

    Attributes:
        ddp_weakref: Calls to the DDP model. Its `mixed_precision` names the dtypes.
        upcast_stream: Where upcasts run; on CPU a stream changes nothing.
        wait_for_stream_enqueued: Whether this backward's final callback is queued already.
    """

    ddp_weakref: Any
    upcast_stream: torch.Stream
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in `reduce_dtype`, and give parameters and gradients back their full precision."""
    ddp = hook_state.ddp_weakref()
    full = bucket.buffer()
    reduce_dtype = ddp.mixed_precision.reduce_dtype
    if reduce_dtype not in (None, full.dtype):
        bucket.set_buffer(Cast(reduce_dtype).encode(full)[0])
    future = run_program(Exact(), ddp.process_group, bucket)

    # A parameter's gradient is complete when its bucket comes here, so its low-precision copy has done its
    # work; DDP writes the averaged gradient into the full-precision one afterwards.
    on_accelerator = full.device.type != "cpu"
    with hook_state.upcast_stream if on_accelerator else contextlib.nullcontext():
        parameters: list[Any] = bucket.parameters()  # with the attributes that DDP's set-up adds
        for parameter in parameters:
            parameter.data = parameter._fp_param
            _free_storage(parameter._mp_param)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.to(parameter.data.dtype)
    if not hook_state.wait_for_stream_enqueued:
        hook_state.wait_for_stream_enqueued = True
        Variable._execution_engine.queue_callback(lambda: _end_of_backward(hook_state, on_accelerator))
    return future


def _end_of_backward(hook_state: _AllreduceUpcastHookState, on_accelerator: bool) -> None:
    """Join the streams, drop this backward's hooks, and upcast what has no gradient."""
    if on_accelerator:
        torch.accelerator.current_stream().wait_stream(hook_state.upcast_stream)
    for parameter in hook_state.ddp_weakref().module.parameters():
        if hasattr(parameter, "_ddp_mp_hook_state"):
            parameter._ddp_mp_hook_state[1].remove()
            del parameter._ddp_mp_hook_state
        if not parameter.requires_grad and not hasattr(parameter, "_ddp_ignored"):
            parameter.data = parameter._fp_param
    hook_state.wait_for_stream_enqueued = False
