"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks`.

Differences from torch:

- The optimizer sees the gradients that the hook returned, even if the hook replaces the bucket's buffer.
- Optimizers in backward need no accelerator and work with any hook (`register_optim_in_backward`).
- Buckets that arrive at the same time are stepped one after another.
"""

# DDP inspects a hook's annotations and rejects strings: no `from __future__ import annotations` here.

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.amp.loss_scale import check_no_scaler
from thinwire.ddp_comm_hooks.default_hooks import Hook, allreduce_hook
from thinwire.errors import OptionError
from thinwire.models.ddp.internals import (
    after_ddp_finishes,
    in_backward_optimizers,
    skip_in_backward_set_up,
    steps_in_backward,
)
from thinwire.models.ddp.model import check_bucket
from thinwire.step.autograd import in_backward
from thinwire.step.options import unwrapped
from thinwire.strategies.zero.owner_step import gradients_in, step_some

__all__: list[str] = []

_STEP = "step_param"
_TORCHS_HANDLES = "torch.distributed.optim.apply_optimizer_in_backward"


class _OptimizerHookState:
    """State of `_hook_then_optimizer`: the optimizer and its parameters.

    Args:
        functional_optim: Optimizer with a method `step_param(parameter, gradient)`.
        params: Parameters to step. None steps all.
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
                " to update one parameter as soon as its gradient is available"
            )


def _hook_then_optimizer(hook: Hook, optimizer_state: _OptimizerHookState) -> Hook:
    """Return a hook that also runs the optimizer on every bucket as soon as it is reduced, during backward.

    `hook` may be thinwire's, torch's or your own. Do not call `step()` of an optimizer of these parameters.

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
    """Return a hook that steps each parameter's own optimizers as soon as its gradient is reduced.

    The hook's state is a weak reference to the DDP model. Register it with `register_optim_in_backward`.
    Otherwise DDP registers torch's own hook in the first forward, and that one needs an accelerator.

    Args:
        gradient_is_bucket_view: The DDP model's `gradient_as_bucket_view`.
        hook: Hook that reduces the gradients: thinwire's, torch's or your own.
        hook_state: State that `hook` is called with.
    """
    lock = threading.Lock()

    def step(bucket: dist.GradBucket) -> None:
        for parameter, gradient in gradients_in(bucket.buffer(), bucket.parameters()):
            optimizers = in_backward_optimizers(parameter)
            if optimizers and not gradient_is_bucket_view:
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()

    def apply_optim_in_backward_hook(ddp: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        check_bucket(bucket)
        model = ddp()
        if bucket.index() == 0 and in_backward():
            after_ddp_finishes(lambda: _drop_gradients(model))
        return _reduced_then(step, hook, hook_state, bucket, lock)

    return apply_optim_in_backward_hook


def register_optim_in_backward(
    ddp: DistributedDataParallel, hook: Hook = allreduce_hook, hook_state: Any = None
) -> None:
    """Step every parameter's own optimizers in backward, on gradients that `hook` has reduced.

    A parameter's optimizers are in its list `_in_backward_optimizers`, which torch's
    `_apply_optimizer_in_backward` or your own code sets. The gradient is None after backward. Call this
    before the model's first forward.

    Args:
        ddp: DDP model to register the hook on.
        hook: Hook that reduces the gradients: thinwire's, torch's or your own.
        hook_state: State that `hook` is called with.

    Example::

        for parameter in ddp.parameters():
            parameter._in_backward_optimizers = [torch.optim.SGD([parameter], lr=0.1)]
        register_optim_in_backward(ddp)
    """
    torchs = sys.modules.get(_TORCHS_HANDLES)
    for parameter in ddp.module.parameters():
        # torch's own hooks would step as soon as the gradient is computed, before it is reduced.
        for handle in torchs.param_to_optim_hook_handle_map.get(parameter, []) if torchs else []:
            handle.remove()
    made = _apply_optim_in_backward_hook(ddp.gradient_as_bucket_view, hook, hook_state)
    ddp.register_comm_hook(weakref.ref(ddp), made)
    skip_in_backward_set_up(ddp)


def register_optimizer_overlap(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    hook: Hook = allreduce_hook,
    hook_state: Any = None,
) -> None:
    """Step any optimizer bucket by bucket in backward, as soon as `hook` has reduced a bucket.

    Gradients are None after backward, so `optimizer.step()` does nothing. Keep the call for LR schedulers.
    Gradient clipping, a GradScaler and closures cannot be used. Every backward is a step.

    Args:
        ddp: DDP model to register the hook on.
        optimizer: Any `torch.optim` optimizer of the model's parameters.
        hook: Hook that reduces the gradients: thinwire's, torch's or your own.
        hook_state: State that `hook` is called with.

    Raises:
        UnavailableError: In the first backward, if a GradScaler is in use.

    Example::

        register_optimizer_overlap(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3))
    """
    optimizer = unwrapped(optimizer)
    lock = threading.Lock()
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    checked_scalers: list[bool] = []

    def step(bucket: dist.GradBucket) -> None:
        pairs = gradients_in(bucket.buffer(), bucket.parameters())
        step_some(optimizer, [pair for pair in pairs if id(pair[0]) in held])

    def optimizer_overlap_hook(model: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        check_bucket(bucket)
        if not checked_scalers:
            check_no_scaler("step after backward")
            checked_scalers.append(True)
        if bucket.index() == 0 and in_backward():
            after_ddp_finishes(lambda: _drop(parameter for parameter in model().parameters()))
        return _reduced_then(step, hook, hook_state, bucket, lock)

    ddp.register_comm_hook(weakref.ref(ddp), optimizer_overlap_hook)


def _reduced_then(
    step: Callable[[dist.GradBucket], None],
    hook: Hook,
    hook_state: Any,
    bucket: dist.GradBucket,
    lock: threading.Lock,
) -> torch.futures.Future[torch.Tensor]:
    """Run the hook, then the step on the bucket with DDP's original buffer."""
    check_bucket(bucket)
    buffer = bucket.buffer()

    # It issues no collective, so it may run on any thread. The lock is for two that run at once.
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


def _drop_gradients(model: torch.nn.Module) -> None:
    _drop(parameter for parameter in model.parameters() if steps_in_backward(parameter))


def _drop(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
