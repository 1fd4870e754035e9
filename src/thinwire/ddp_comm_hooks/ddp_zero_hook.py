"""Drop-in replacement for `torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook`.

The hooks combine DDP with `ZeroRedundancyOptimizer`. Every parameter has one owner, which keeps its optimizer
state, steps it, and sends it to all ranks. The step runs inside backward, so that stepping and sending
overlap with gradients that are still in flight. Leave `zero.step()` out of the training loop.

`hook_with_zero_step` begins to step when backward has computed all gradients.
`hook_with_zero_step_interleaved` begins with each bucket as soon as it is reduced.

For new code, `thinwire.attach(ddp, thinwire.ZeRO(), optimizer=optimizer)` shards the state of any
optimizer, sends 2N bytes instead of 3N, and works with gradient clipping and GradScaler.

Differences from torch:

- Gloo is supported. torch raises on it.
- No update is skipped. From the first step on, parameters equal those of plain DDP with the same optimizer.
  torch skips the first two or three.
- Any optimizer class, any number of parameter groups and LR schedulers work. torch takes functional
  optimizers and one group.
- Ranks are those of the process group, not of the world.
- `shard_buckets` accepts parameters of any sizes.
- The hook inside may be thinwire's, torch's or your own.

Performance:
    Optimizer state takes 1 / W of the memory on each rank. The hook inside reduces gradients to all ranks,
    and owners send parameters: 3N bytes a step instead of plain DDP's 2N.

Safety:
    Steps inside backward cannot be rolled back, so a GradScaler raises instead of stepping on overflowed
    gradients. A rank that has run out of inputs (`Join`) raises too. The optimizer and the model must span
    the same ranks, which is checked when the hook is made.
"""

# DDP inspects a hook's annotations and rejects strings: no `from __future__ import annotations` here.

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.amp.loss_scale import check_no_scaler
from thinwire.ddp_comm_hooks.default_hooks import Hook
from thinwire.engine.comm.borrowed_group import run_abreast
from thinwire.errors import OptionError, UnavailableError
from thinwire.models.ddp.internals import has_rebuilt_buckets
from thinwire.models.ddp.model import check_bucket
from thinwire.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer, _OverlapStatus
from thinwire.step.autograd import in_backward
from thinwire.strategies.zero.overlap import Gradients, Overlap, Usage
from thinwire.strategies.zero.owner_step import gradients_in, step_some
from thinwire.strategies.zero.parameters import share

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Future = torch.futures.Future[torch.Tensor]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Return a hook that steps each owner's parameters once backward has computed all gradients.

    The steps overlap with gradients that are still in flight and with sending parameters. Leave `zero.step()`
    out of the training loop.

    Args:
        hook: Hook that reduces the gradients: thinwire's, torch's or your own.
        ddp: DDP model that the hook will be registered on.
        zero: Optimizer of the model's parameters, made with `overlap_with_ddp=True`.
        shard_buckets: True gives neighbouring parameters to different owners. False gives about a bucket at
            a time to one owner.

    Returns:
        The hook to register on `ddp`.

    Raises:
        OptionError: If `zero` was made without `overlap_with_ddp=True` or has other ranks than `ddp`.

    Example::

        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    """
    _check(ddp, zero, shard_buckets)
    ddp_ref = weakref.ref(ddp)
    waiting: list[tuple[dist.GradBucket, torch.Tensor, Any]] = []

    def hook_with_zero_fn(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        check_bucket(bucket)
        overlap, buffer = _hook_with_zero_step_setup(ddp_ref, zero, bucket), bucket.buffer()
        reduced = hook(state, bucket)
        waiting.append((bucket, buffer, reduced))
        if not bucket.is_last():
            return reduced.then(lambda done: _whole(done, buffer))
        ready, waiting[:] = list(waiting), []
        futures = [overlap.submit(*reduced, last=reduced is ready[-1]) for reduced in ready]
        overlap.settle_after_backward()
        return futures[-1]

    return hook_with_zero_fn


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Return a hook that steps each bucket's parameters at their owners as soon as its gradients are reduced.

    The steps and sending parameters overlap with backward itself. Arguments, return value and errors are
    those of `hook_with_zero_step`.

    Example::

        ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    """
    _check(ddp, zero, shard_buckets)
    ddp_ref = weakref.ref(ddp)

    def hook_with_zero_interleaved_fn(
        state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        check_bucket(bucket)
        overlap, buffer = _hook_with_zero_step_setup(ddp_ref, zero, bucket), bucket.buffer()

        def zero_step(reduced: Any) -> torch.futures.Future[torch.Tensor]:
            return overlap.submit(bucket, buffer, reduced, last=bucket.is_last())

        stepped = zero_step(hook(state, bucket))
        if bucket.is_last():
            overlap.settle_after_backward()
        return stepped

    return hook_with_zero_interleaved_fn


def _check(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool) -> None:
    if not zero._overlap_with_ddp:
        raise OptionError(
            "zero was made without overlap_with_ddp=True, so that its step() would update parameters a second"
            " time: make it with overlap_with_ddp=True, and leave step() out of the training loop"
        )
    ranks = [dist.get_process_group_ranks(group) for group in (zero.process_group, ddp.process_group)]
    if ranks[0] != ranks[1]:
        raise OptionError(
            f"zero spreads over the ranks {ranks[0]}, and the model is averaged over {ranks[1]}: give both"
            " the same process_group"
        )
    zero._assign_for_overlap(shard_buckets)
    if ddp.find_unused_parameters or ddp.static_graph:  # a static graph may leave parameters out
        zero._overlap_info.usage = Usage(ddp.module.parameters())


def _whole(done: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a completed future in the buffer's dtype."""
    value = done.value()
    result: torch.Tensor = value[0] if isinstance(value, list) else value
    return result if result.dtype == buffer.dtype else result.to(buffer.dtype)


def _hook_with_zero_step_setup(
    ddp_ref: "weakref.ref[DistributedDataParallel]", zero: ZeroRedundancyOptimizer, bucket: dist.GradBucket
) -> Overlap:
    """Return the overlap that runs the steps, made with the first bucket of the first backward."""
    ddp, info = ddp_ref(), zero._overlap_info
    assert ddp is not None, "its own hook is running"
    if not in_backward():
        raise UnavailableError(
            "a rank has run out of inputs (Join), and steps inside backward cannot continue without it: give"
            " every rank the same number of batches"
        )
    if has_rebuilt_buckets(ddp) and info.status == _OverlapStatus.UNINITIALIZED:
        info.status = _OverlapStatus.DDP_HAS_REBUILT_BUCKETS
    if bucket.index() == 0:
        info.params_per_bucket.clear()
    _save_ddp_bucket_info(bucket, zero)
    if info.overlap is None:
        check_no_scaler("make the optimizer without overlap_with_ddp")
        parameters = enumerate(zero._index_to_param)
        named = {str(index): parameter for index, parameter in parameters if parameter.requires_grad}
        owners = {name: zero._param_to_rank[parameter] for name, parameter in named.items()}
        step = partial(_perform_steps, zero)
        info.overlap = Overlap(ddp, owners, named, step, info.usage)
    info.status = _OverlapStatus.INITIALIZED
    return info.overlap


def _save_ddp_bucket_info(bucket: dist.GradBucket, zero: ZeroRedundancyOptimizer) -> None:
    """Record the parameters of DDP's current buckets, as torch does; no computation depends on it."""
    zero._overlap_info.params_per_bucket.append(bucket.parameters())


def _perform_steps(zero: ZeroRedundancyOptimizer, gradients: Gradients) -> None:
    # An LR scheduler changes the groups of the outer optimizer.
    zero._sync_param_groups(zero.param_groups, zero.optim.param_groups)
    step_some(zero.optim, gradients)


def _perform_local_step(bucket: dist.GradBucket, zero: ZeroRedundancyOptimizer, rank: int) -> None:
    """Step the parameters of a bucket that this rank, `rank`, owns."""
    own = [
        (parameter, gradient)
        for parameter, gradient in gradients_in(bucket.buffer(), bucket.parameters())
        if zero._param_to_rank.get(parameter) == rank
    ]
    if own:
        _perform_steps(zero, own)


def _broadcast_bucket(bucket_index: int, zero: ZeroRedundancyOptimizer) -> None:
    """Send the parameters of one of DDP's buckets from their owners to all ranks, and wait."""
    held = zero._overlap_info.params_per_bucket[bucket_index]
    owned = [
        [parameter for parameter in held if zero._param_to_rank.get(parameter) == rank]
        for rank in range(zero.world_size)
    ]
    programs = (share(batch, rank, zero.rank) for rank, batch in enumerate(owned) if batch)
    run_abreast(programs, zero.process_group)
