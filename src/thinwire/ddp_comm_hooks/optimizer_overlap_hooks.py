"""The names of `torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks`.

What differs from torch's: the gradients that the optimizer sees are what the hook returned, whichever hook it
is, also where it changes the bucket's buffer on the way; optimizers in backward need no accelerator, and
reduce by any hook (`register_optim_in_backward`); buckets that arrive at once are stepped one after another.
"""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from thinwire.bridge import in_backward
from thinwire.ddp_comm_hooks.default_hooks import Hook, allreduce_hook
from thinwire.errors import OptionError
from thinwire.sharding.step import gradients_in, refuse_scalers, step_some

__all__: list[str] = []

_STEP = "step_param"
_OPTIMIZERS = "_in_backward_optimizers"
_TORCHS_HANDLES = "torch.distributed.optim.apply_optimizer_in_backward"


class _OptimizerHookState:
    """The optimizer that `_hook_then_optimizer` runs, and for which parameters: None for all.

    `functional_optim` needs a method `step_param(parameter, gradient)`.
    """

    __slots__ = ["functional_optimizer", "params_to_optimize"]

    def __init__(self, functional_optim: Any, params: Iterable[torch.Tensor] | None = None) -> None:
        self.functional_optimizer = functional_optim
        self._check_valid_functional_optim()
        self._set_params_to_optimize(params)

    def _set_params_to_optimize(self, params: Iterable[torch.Tensor] | None) -> None:
        if params is not None:
            self.params_to_optimize = set(params)

    def _check_valid_functional_optim(self) -> None:
        if not callable(getattr(self.functional_optimizer, _STEP, None)):
            raise OptionError(
                f"functional_optim={self.functional_optimizer!r} needs a method {_STEP}(parameter, gradient),"
                " to update one parameter as soon as its gradient is there"
            )


def _hook_then_optimizer(hook: Hook, optimizer_state: _OptimizerHookState) -> Hook:
    """Run a hook, and the optimizer on every bucket as soon as it is reduced, beside backward.

    `hook` may be thinwire's, torch's or yours. Do not call an optimizer's `step()` for the same parameters.

    Example::

        state = _OptimizerHookState(functional_optimizer, params=ddp.parameters())
        ddp.register_comm_hook(None, _hook_then_optimizer(allreduce_hook, state))
    """
    lock = threading.Lock()

    def step(bucket: dist.GradBucket) -> None:
        chosen = getattr(optimizer_state, "params_to_optimize", None)
        for parameter, gradient in gradients_in(bucket.buffer(), bucket.parameters()):
            if chosen is None or parameter in chosen:
                optimizer_state.functional_optimizer.step_param(parameter, gradient)

    def hook_then_optimizer_wrapper(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _reduced_then(step, hook, hook_state, bucket, lock)

    return hook_then_optimizer_wrapper


def _apply_optim_in_backward_hook(
    gradient_is_bucket_view: bool, hook: Hook = allreduce_hook, hook_state: Any = None
) -> Hook:
    """A hook that steps each parameter's own optimizers, in backward, as soon as its gradient is reduced.

    Its state is a weak reference to the DDP model. `register_optim_in_backward` registers it: in its first
    forward, DDP would otherwise register torch's, which needs an accelerator.

    Args:
        gradient_is_bucket_view: The DDP model's `gradient_as_bucket_view`.
        hook: Reduces the gradients: thinwire's, torch's or yours.
        hook_state: What `hook` is called with.

    """
    lock = threading.Lock()

    def step(bucket: dist.GradBucket) -> None:
        for parameter, gradient in gradients_in(bucket.buffer(), bucket.parameters()):
            optimizers = getattr(parameter, _OPTIMIZERS, ())
            if optimizers and not gradient_is_bucket_view:
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()

    def apply_optim_in_backward_hook(ddp: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        model = ddp()
        if bucket.index() == 0 and in_backward():
            _after_backward(lambda: _drop_gradients(model))
        return _reduced_then(step, hook, hook_state, bucket, lock)

    return apply_optim_in_backward_hook


def register_optim_in_backward(
    ddp: DistributedDataParallel, hook: Hook = allreduce_hook, hook_state: Any = None
) -> None:
    """Step every parameter's own optimizers in backward, on gradients that `hook` has reduced.

    A parameter's optimizers are those of torch's `_apply_optimizer_in_backward`, or what you put in a list
    `_in_backward_optimizers` of its own. Its gradient is None after backward. Call this before the model's
    first forward.

    Example::

        for parameter in ddp.parameters():
            parameter._in_backward_optimizers = [torch.optim.SGD([parameter], lr=0.1)]
        register_optim_in_backward(ddp)
    """
    torchs = sys.modules.get(_TORCHS_HANDLES)
    for parameter in ddp.module.parameters():
        # torch's own would step as soon as the gradient is there, before it is reduced.
        for handle in torchs.param_to_optim_hook_handle_map.get(parameter, []) if torchs else []:
            handle.remove()
    made = _apply_optim_in_backward_hook(ddp.gradient_as_bucket_view, hook, hook_state)
    ddp.register_comm_hook(weakref.ref(ddp), made)
    ddp._setup_in_backward_optimizers = _set_up_already  # type: ignore[method-assign]


def register_optimizer_overlap(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    hook: Hook = allreduce_hook,
    hook_state: Any = None,
) -> None:
    """Step any optimizer bucket by bucket, in backward, as gradients that `hook` has reduced arrive.

    Gradients are None after backward, so `optimizer.step()` does nothing: leave it in for LR schedulers.
    There is no moment for gradient clipping, a GradScaler or a closure; every backward is a step.

    Example::

        register_optimizer_overlap(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3))
    """
    lock, held = threading.Lock(), {id(one) for group in optimizer.param_groups for one in group["params"]}
    looked: list[bool] = []

    def step(bucket: dist.GradBucket) -> None:
        pairs = gradients_in(bucket.buffer(), bucket.parameters())
        step_some(optimizer, [pair for pair in pairs if id(pair[0]) in held])

    def optimizer_overlap_hook(model: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not looked:
            refuse_scalers("step after backward")
            looked.append(True)
        if bucket.index() == 0 and in_backward():
            _after_backward(lambda: _drop(parameter for parameter in model().parameters()))
        return _reduced_then(step, hook, hook_state, bucket, lock)

    ddp.register_comm_hook(weakref.ref(ddp), optimizer_overlap_hook)


def _set_up_already() -> None:
    """In place of what DDP does about it in its first forward."""


def _reduced_then(
    step: Callable[[dist.GradBucket], None],
    hook: Hook,
    hook_state: Any,
    bucket: dist.GradBucket,
    lock: threading.Lock,
) -> torch.futures.Future[torch.Tensor]:
    """Run the hook, then the step, on the bucket as DDP made it, whatever the hook did with it."""
    buffer = bucket.buffer()

    # No collective in here, so it does not matter which thread runs it, or when; two may at once.
    def optimize(done: torch.futures.Future[Any]) -> torch.Tensor:
        value = done.value()
        result = value[0] if isinstance(value, list) else value
        with lock, torch.no_grad():
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result)
            bucket.set_buffer(buffer)
            step(bucket)
        return buffer

    return hook(hook_state, bucket).then(optimize)


def _after_backward(action: Callable[[], None]) -> None:
    """Behind DDP's own last callback, which it queues after its last bucket and which writes gradients."""
    queue = Variable._execution_engine.queue_callback
    queue(lambda: queue(action))


def _drop_gradients(model: torch.nn.Module) -> None:
    _drop(parameter for parameter in model.parameters() if hasattr(parameter, _OPTIMIZERS))


def _drop(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
