"""Optimizers that run in backward: bit for bit what they do after it, with anybody's hooks."""

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as torchs
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.ddp_comm_hooks import default_hooks as our_hooks
from thinwire.ddp_comm_hooks import optimizer_overlap_hooks as ours
from thinwire.errors import OptionError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch compiles with what torch itself has deprecated
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    from torch.distributed.optim.functional_sgd import _FunctionalSGD

STEPS, WIDTH = 12, 24
OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def users_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves the buffer alone."""
    mean = bucket.buffer() / dist.get_world_size()
    work = dist.all_reduce(mean, async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0])


def raw_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Returns a list, as torch's collectives do: DDP would not take it."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future


class OneByOne:
    """A functional optimizer: an SGD of each parameter's own, which notes if two run at once."""

    def __init__(self) -> None:
        self._optimizers: dict[torch.Tensor, Any] = {}
        self._busy = threading.Lock()

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        assert self._busy.acquire(blocking=False), "two buckets at once"
        optimizer = self._optimizers.setdefault(parameter, torch.optim.SGD([parameter], **OPTIONS))
        kept, parameter.grad = parameter.grad, gradient
        optimizer.step()
        parameter.grad = kept
        self._busy.release()


def trained(ddp: Any, rank: int, optimizer: Any = None) -> torch.Tensor:
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
    return flat_parameters(ddp.module)


def model(**options: Any) -> DDP:
    return DDP(mlp(layers=4), bucket_cap_mb=0.004, **options)


def after_backward(rank: int, hook: Any) -> torch.Tensor:
    ddp = model()
    ddp.register_comm_hook(None, hook)
    return trained(ddp, rank, torch.optim.SGD(ddp.parameters(), **OPTIONS))


def functional_of(kit: Any, ddp: DDP) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its own functional optimizers
        return _FunctionalSGD(list(ddp.parameters()), **OPTIONS) if kit is torchs else OneByOne()


def overlapped(rank: int, hook: Any, kit: Any, some: bool = False) -> torch.Tensor:
    ddp = model()
    parameters = list(ddp.parameters())[:3] if some else None
    state = kit._OptimizerHookState(functional_of(kit, ddp), parameters)
    ddp.register_comm_hook(None, kit._hook_then_optimizer(hook, state))
    return trained(ddp, rank)


def in_backward(rank: int, hook: Any, view: bool) -> torch.Tensor:
    ddp = model(gradient_as_bucket_view=view)
    if view:
        _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), OPTIONS)
    for parameter in () if view else ddp.parameters():
        parameter._in_backward_optimizers = [torch.optim.SGD([parameter], **OPTIONS)]  # type: ignore[attr-defined]
    ours.register_optim_in_backward(ddp, *(() if hook is None else (hook,)))
    result = trained(ddp, rank)
    assert all(parameter.grad is None for parameter in ddp.parameters())
    return result


def all_ways(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    plain = {
        "ours": our_hooks.allreduce_hook,
        "torch's": torch_hooks.allreduce_hook,
        "user's": users_hook,
        "fp16 around user's": our_hooks.fp16_compress_wrapper(users_hook),
    }
    results = {}
    for name, hook in plain.items():
        results[name] = after_backward(rank, hook)
        results[f"{name}, then optimizer"] = overlapped(rank, hook, ours)
        results[f"{name}, in backward"] = in_backward(rank, hook, view=False)
    results["user's, raw"] = overlapped(rank, raw_hook, ours)
    results["ours, in backward, views"] = in_backward(rank, None, view=True)
    results["torch's, torch's overlap"] = overlapped(rank, torch_hooks.allreduce_hook, torchs)
    untouched = flat_parameters(mlp(layers=4))
    size = sum(each.numel() for each in list(mlp(layers=4).parameters())[:3])
    part = overlapped(rank, our_hooks.allreduce_hook, ours, some=True)
    assert torch.equal(part[size:], untouched[size:])
    assert not torch.equal(part[:size], untouched[:size])
    return results


def test_the_same_as_after_backward() -> None:
    by_rank = run_ranks(all_ways, 2)
    for results in by_rank:
        for name, end in results.items():
            reference = results[name.partition(",")[0]]
            assert torch.equal(end, reference), f"{name} differs by {(end - reference).abs().max()}"
            assert torch.equal(end, by_rank[0][name]), f"{name}: ranks differ"
    assert torch.equal(by_rank[0]["ours"], by_rank[0]["torch's"])
    assert not torch.equal(by_rank[0]["ours"], flat_parameters(mlp(layers=4)))


class Detour(nn.Module):
    """Its second layer is used in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        self.forwards += 1
        return self.second(hidden) if self.forwards == 1 else hidden


def unused(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    results = {}
    for name, kit in (("ours", ours), ("torch's", torchs)):
        ddp = DDP(Detour(), find_unused_parameters=True)
        state = kit._OptimizerHookState(functional_of(kit, ddp))
        ddp.register_comm_hook(None, kit._hook_then_optimizer(our_hooks.allreduce_hook, state))
        results[name] = trained(ddp, rank)
    ddp = DDP(Detour(), find_unused_parameters=True)
    results["after backward"] = trained(ddp, rank, torch.optim.SGD(ddp.parameters(), **OPTIONS))
    return results


def test_parameters_that_no_rank_used_are_stepped_as_by_torchs() -> None:
    """By their momentum. An optimizer after backward finds no gradient, and leaves them alone."""
    for results in run_ranks(unused, 2):
        assert torch.equal(results["ours"], results["torch's"])
        used, left = results["ours"].chunk(2)
        plain, untouched = results["after backward"].chunk(2)
        assert torch.equal(used, plain)
        assert not torch.equal(left, untouched)


@pytest.mark.parametrize("kit", [ours, torchs])
def test_an_optimizer_without_step_param(kit: Any) -> None:
    with pytest.raises(ValueError, match="step_param") as caught:
        kit._OptimizerHookState(object())
    assert kit is torchs or isinstance(caught.value, OptionError)
