"""The torch-named hooks on real ranks: where they must be better than torch's, they are."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_gradients, flat_parameters, mlp
from thinwire.ddp_comm_hooks import DDPCommHookType, mixed_precision_hooks, register_ddp_comm_hook
from thinwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from thinwire.ddp_comm_hooks.debugging_hooks import noop_hook
from thinwire.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from thinwire.optim import ZeroRedundancyOptimizer

TINY_BUCKETS = 0.002


def gradient_with(
    hook: Any, rank: int, state: Any = None, model: nn.Module | None = None, steps: int = 2, **kw: Any
) -> torch.Tensor:
    """The last step's gradient: by the second, DDP has rebuilt its buckets."""
    ddp = DDP(model or mlp(), bucket_cap_mb=TINY_BUCKETS, **kw)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
    return flat_gradients(ddp.module)


def on_cpu(rank: int, world_size: int) -> None:
    exact = gradient_with(None, rank)
    assert torch.equal(gradient_with(allreduce_hook, rank), exact)
    assert torch.equal(gradient_with(allreduce_hook, rank, state=dist.group.WORLD), exact)
    for hook in (bf16_compress_hook, bf16_compress_wrapper(allreduce_hook)):
        rounded = gradient_with(hook, rank)
        assert not torch.equal(rounded, exact)
        torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=1e-5)
    for hook in (fp16_compress_hook, fp16_compress_wrapper(allreduce_hook)):
        torch.testing.assert_close(gradient_with(hook, rank), exact, rtol=2e-3, atol=1e-6)
    assert not torch.equal(gradient_with(noop_hook, rank), exact)


def test_every_hook_runs_on_cpu_over_gloo() -> None:
    run_ranks(on_cpu, 3)


def around(hook: Any, derived: bool = False, every: int = 1) -> Any:
    """A user's hook that waits for ours, at every bucket or at some."""

    def mine(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        if derived:
            future = future.then(lambda done: done.wait())
        if bucket.index() % every == 0:
            own: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            own.set_result(future.wait())
            return own
        return future

    return mine


def powersgd_state() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def waiting(rank: int, world_size: int) -> None:
    """A user's hook waits for ours, at every bucket or at some, for its future or for what came of it."""
    for hook, make in (
        (powerSGD_hook, powersgd_state),
        (fp16_compress_wrapper(powerSGD_hook), powersgd_state),
        (fp16_compress_hook, lambda: None),
    ):
        expected = gradient_with(hook, rank, make(), steps=3)
        for derived, every in ((False, 1), (True, 1), (False, 3)):
            waited = gradient_with(around(hook, derived, every), rank, make(), steps=3)
            assert torch.equal(waited, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_hook_may_wait_for_ours(world_size: int) -> None:
    run_ranks(waiting, world_size)


def images_gradient(rank: int, hook: Any, layout: torch.memory_format) -> torch.Tensor:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5)))
    ddp = DDP(model.to(memory_format=layout), bucket_cap_mb=TINY_BUCKETS)
    ddp.register_comm_hook(powersgd_state(), hook)
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step, width=8 * 5 * 5).view(-1, 8, 5, 5)).square().mean().backward()
    return flat_gradients(ddp.module)


def waiting_for_images(rank: int, world_size: int) -> None:
    """channels_last gradients are exchanged as copies, and brought back to DDP's buckets."""
    for layout in (torch.contiguous_format, torch.channels_last):
        expected = images_gradient(rank, powerSGD_hook, layout)
        for derived in (False, True):
            waited = images_gradient(rank, around(powerSGD_hook, derived), layout)
            torch.testing.assert_close(waited, expected, rtol=1e-5, atol=1e-7)


def test_a_hook_may_wait_for_ours_on_a_channels_last_model() -> None:
    run_ranks(waiting_for_images, 2)


def waiting_for_steps(rank: int, world_size: int) -> None:
    def trained(wrap: Any, wait: bool) -> torch.Tensor:
        ddp = DDP(mlp(width=16, layers=4), bucket_cap_mb=0.001)
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
        )
        hook = wrap(powerSGD_hook, ddp, zero)
        ddp.register_comm_hook(powersgd_state(), around(hook) if wait else hook)
        for step in range(4):
            ddp.zero_grad()
            ddp(batch(rank, step, width=16)).square().mean().backward()
        return flat_parameters(ddp.module)

    for wrap in (hook_with_zero_step, hook_with_zero_step_interleaved):
        assert torch.equal(trained(wrap, wait=True), trained(wrap, wait=False)), wrap


def test_a_hook_may_wait_for_the_steps_of_the_zero_hooks() -> None:
    run_ranks(waiting_for_steps, 2)


def single(rank: int, world_size: int) -> None:
    exact = gradient_with(None, rank)
    assert torch.equal(gradient_with(allreduce_hook, rank), exact)
    torch.testing.assert_close(gradient_with(bf16_compress_hook, rank), exact, rtol=2e-2, atol=1e-5)


def test_hooks_on_a_single_rank() -> None:
    run_ranks(single, 1)


def foreign(rank: int, world_size: int) -> None:
    """Wrappers take torch's hooks and the user's as they come."""
    exact = gradient_with(None, rank)

    def mine(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert bucket.buffer().dtype in (torch.float16, torch.bfloat16)
        return torch_default.allreduce_hook(state, bucket)

    for wrapper in (fp16_compress_wrapper, bf16_compress_wrapper):
        for inner in (torch_default.allreduce_hook, mine):
            for as_view in (True, False):
                rounded = gradient_with(wrapper(inner), rank, gradient_as_bucket_view=as_view)
                torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=1e-5)
                assert not torch.equal(rounded, exact)
        own = gradient_with(wrapper(noop_hook), rank)
        torch.testing.assert_close(own, gradient_with(noop_hook, rank), rtol=1e-2, atol=1e-5)


def test_wrappers_accept_foreign_hooks() -> None:
    run_ranks(foreign, 2)


class Scale(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def large(rank: int, world_size: int, hook: Any) -> list[float]:
    ddp = DDP(Scale())
    ddp.register_comm_hook(None, hook)
    ddp(torch.full((4,), 70000.0 if rank == 0 else 0.0)).sum().backward()
    gradient = ddp.module.weight.grad
    assert gradient is not None
    return [float(number) for number in gradient]


def test_fp16_divides_before_it_casts() -> None:
    for gradient in run_ranks(large, 2, fp16_compress_hook):
        assert gradient == [35008.0] * 4  # the nearest fp16 to 35000
    for gradient in run_ranks(large, 2, torch_default.fp16_compress_hook):
        assert gradient == [float("inf")] * 4  # torch's, which is why


def in_pairs(rank: int, world_size: int, given: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair is the model's own group, or is given to the hook of a model that spans the world."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    expected = gradient_with(None, rank, process_group=pair)
    if given == "to the model":
        return gradient_with(allreduce_hook, rank, process_group=pair), expected
    return gradient_with(allreduce_hook, rank, state=pair), expected


@pytest.mark.parametrize("given", ["to the model", "to the hook"])
def test_the_group_averaged_over_is_the_hooks_or_else_the_models_own(given: str) -> None:
    for got, expected in run_ranks(in_pairs, 4, given):
        assert torch.equal(got, expected)


def rewrapped(rank: int, world_size: int) -> tuple[bool, str]:
    """The module gets a second DDP, over another group, while the first one lives."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = mlp()
    first = DDP(model)
    first.register_comm_hook(None, allreduce_hook)
    first(batch(rank, 0)).square().mean().backward()
    second = DDP(model, process_group=pairs[rank // 2])
    second.register_comm_hook(None, allreduce_hook)
    try:
        second(batch(rank, 1)).square().mean().backward()
    except thinwire.UnavailableError as error:
        said = str(error)
    del first, second
    third = DDP(model, process_group=pairs[rank // 2])
    third.register_comm_hook(None, allreduce_hook)
    third.zero_grad()
    third(batch(rank, 2)).square().mean().backward()
    plain = DDP(mlp(), process_group=pairs[rank // 2])
    plain(batch(rank, 2)).square().mean().backward()
    return torch.equal(flat_gradients(model), flat_gradients(plain.module)), said


def test_a_module_wrapped_twice_is_refused_until_one_is_gone() -> None:
    for equal, said in run_ranks(rewrapped, 4):
        assert "2 DDP models with hooks own this bucket's parameters" in said
        assert equal


def enumerated(rank: int, world_size: int) -> None:
    exact = gradient_with(None, rank)
    for kind in DDPCommHookType:
        ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
        if "POWER" in kind.name:
            continue  # tests/ranks/programs/test_powersgd.py
        register_ddp_comm_hook(comm_hook_type=kind, model=ddp, state=None)
        for step in range(2):
            ddp.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
        if kind is not DDPCommHookType.NOOP:
            off = (flat_gradients(ddp.module) - exact).norm() / exact.norm()
            assert off < 0.02, f"{kind} is off by {off:.2%}"


def test_hooks_by_name() -> None:
    run_ranks(enumerated, 2)


def upcast(rank: int, world_size: int) -> None:
    """What DDP's own mixed precision sets up on accelerators, set up by hand on CPU."""
    full, low = mlp(), mlp().to(torch.bfloat16)
    for parameter, precise in zip(low.parameters(), full.parameters(), strict=True):
        parameter._fp_param = precise.data  # type: ignore[attr-defined]
        parameter._mp_param = parameter.data  # type: ignore[attr-defined]
    ddp = DDP(low, bucket_cap_mb=TINY_BUCKETS)
    ddp.mixed_precision = SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # type: ignore[assignment]
    state = mixed_precision_hooks._AllreduceUpcastHookState(weakref.ref(ddp), torch.Stream())
    ddp.register_comm_hook(state, mixed_precision_hooks._reducer_allreduce_and_upcast_hook)
    ddp(batch(rank, 0).to(torch.bfloat16)).float().square().mean().backward()
    assert not state.wait_for_stream_enqueued
    for parameter, precise in zip(low.parameters(), full.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        assert parameter.data_ptr() == precise.data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    plain = DDP(mlp().to(torch.bfloat16))
    plain(batch(rank, 0).to(torch.bfloat16)).float().square().mean().backward()
    torch.testing.assert_close(flat_gradients(low), flat_gradients(plain.module), rtol=2e-2, atol=1e-4)


def test_mixed_precision_parameters_return_to_full_precision() -> None:
    run_ranks(upcast, 2)


def wrong_state(rank: int, world_size: int) -> str:
    try:
        gradient_with(allreduce_hook, rank, state="world")
    except thinwire.OptionError as error:
        return str(error)
    return "no error"


def test_a_state_that_is_no_group_is_refused() -> None:
    for error in run_ranks(wrong_state, 2):
        assert "the hook's state is 'world': it must be a process group" in error
