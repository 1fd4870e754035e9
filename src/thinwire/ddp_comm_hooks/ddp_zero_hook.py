"""The names of `torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook`.

What differs from torch's: Gloo is first class; no update is skipped, from the first step on parameters are
what plain DDP and the same optimizer make of them; any optimizer class, any number of parameter groups, LR
schedulers; ranks are those of the group; `shard_buckets` takes any sizes; the hook inside may be thinwire's,
torch's or yours.
"""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.bridge import in_backward
from thinwire.ddp_comm_hooks.default_hooks import Hook
from thinwire.errors import OptionError, UnavailableError
from thinwire.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer, _OverlapStatus
from thinwire.sharding.overlap import Gradients, Overlap
from thinwire.sharding.parameters import share
from thinwire.sharding.step import gradients_in, refuse_scalers, step_some
from thinwire.wire.blocking import run_abreast

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Future = torch.futures.Future[torch.Tensor]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Make a hook after which owners step their parameters, once backward has computed all gradients.

    The steps overlap with the exchange of gradients that are still under way, and with sending parameters.
    Leave `zero.step()` out of the training loop.

    Args:
        hook: Reduces the gradients: thinwire's, torch's or yours.
        ddp: The model to register it on.
        zero: Made with `overlap_with_ddp=True`, from the model's parameters.
        shard_buckets: Whether neighbouring parameters go to different owners; otherwise about a bucket at a
            time goes to one.

    Example::

        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    """
    _check(ddp, zero, shard_buckets)
    ddp_ref = weakref.ref(ddp)
    waiting: list[tuple[dist.GradBucket, torch.Tensor, Any]] = []

    def hook_with_zero_fn(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        overlap, buffer = _hook_with_zero_step_setup(ddp_ref, zero, bucket), bucket.buffer()
        reduced = hook(state, bucket)
        waiting.append((bucket, buffer, reduced))
        if not bucket.is_last():
            return reduced.then(lambda done: _whole(done, buffer))
        ready, waiting[:] = list(waiting), []
        futures = [overlap.submit(*one, last=one is ready[-1]) for one in ready]
        overlap.settle_after_backward()
        return futures[-1]

    return hook_with_zero_fn


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Make a hook after which owners step each bucket's parameters as soon as its gradients are reduced.

    The steps, and sending parameters, overlap with backward itself. Otherwise as `hook_with_zero_step`.

    Example::

        ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    """
    _check(ddp, zero, shard_buckets)
    ddp_ref = weakref.ref(ddp)

    def hook_with_zero_interleaved_fn(
        state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
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


def _whole(done: Any, buffer: torch.Tensor) -> torch.Tensor:
    """What DDP writes to the gradients, in the buffer that it gave."""
    value = done.value()
    result: torch.Tensor = value[0] if isinstance(value, list) else value
    return result if result.dtype == buffer.dtype else result.to(buffer.dtype)


def _hook_with_zero_step_setup(
    ddp_ref: "weakref.ref[DistributedDataParallel]", zero: ZeroRedundancyOptimizer, bucket: dist.GradBucket
) -> Overlap:
    """What runs the steps; made with the first bucket, since owners do not depend on DDP's buckets."""
    ddp, info = ddp_ref(), zero._overlap_info
    assert ddp is not None, "its own hook is running"
    if not in_backward():
        raise UnavailableError(
            "a rank has run out of inputs (Join), and steps inside backward cannot go on without it: give"
            " every rank the same number of batches"
        )
    if ddp._has_rebuilt_buckets and info.status == _OverlapStatus.UNINITIALIZED:
        info.status = _OverlapStatus.DDP_HAS_REBUILT_BUCKETS
    if bucket.index() == 0:
        info.params_per_bucket.clear()
    _save_ddp_bucket_info(bucket, zero)
    if info.overlap is None:
        refuse_scalers("make the optimizer without overlap_with_ddp")
        named = {str(index): one for index, one in enumerate(zero._index_to_param) if one.requires_grad}
        owners = {name: zero._param_to_rank[one] for name, one in named.items()}
        info.overlap = Overlap(ddp, owners, named, lambda gradients: _perform_steps(zero, gradients))
    info.status = _OverlapStatus.INITIALIZED
    return info.overlap


def _save_ddp_bucket_info(bucket: dist.GradBucket, zero: ZeroRedundancyOptimizer) -> None:
    """Note which parameters are in DDP's buckets now; nothing depends on it."""
    zero._overlap_info.params_per_bucket.append(bucket.parameters())


def _perform_steps(zero: ZeroRedundancyOptimizer, gradients: Gradients) -> None:
    zero._sync_param_groups(zero.param_groups, zero.optim.param_groups)  # a scheduler sets the outer ones
    step_some(zero.optim, gradients)


def _perform_local_step(bucket: dist.GradBucket, zero: ZeroRedundancyOptimizer, rank: int) -> None:
    """Step what `rank`, this one, owns of a bucket, by the bucket's gradients."""
    own = [
        (parameter, gradient)
        for parameter, gradient in gradients_in(bucket.buffer(), bucket.parameters())
        if zero._param_to_rank.get(parameter) == rank
    ]
    if own:
        _perform_steps(zero, own)


def _broadcast_bucket(bucket_index: int, zero: ZeroRedundancyOptimizer) -> None:
    """Bring the parameters of one of DDP's buckets from their owners to all ranks, and wait for them."""
    held = zero._overlap_info.params_per_bucket[bucket_index]
    owned = [[one for one in held if zero._param_to_rank.get(one) == rank] for rank in range(zero.world_size)]
    programs = (share(batch, rank, zero.rank) for rank, batch in enumerate(owned) if batch)
    run_abreast(programs, zero.process_group)
