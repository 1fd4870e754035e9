"""Whatever DDP can do, it does the same with a wire: bit by bit what plain DDP computes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, batch, flat_gradients, flat_parameters, mlp, own
from thinwire.ddp_comm_hooks.optimizer_overlap_hooks import register_optimizer_overlap
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

WIDTH = 24
TINY_BUCKETS = 0.002  # MB: one or two tensors each


def train(
    ddp: DDP, rank: int, steps: int = 6, make: Callable[[int, int], torch.Tensor] = batch
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(make(rank, step)).abs().square().mean().backward()
        gradients.append(flat_gradients(ddp.module))
        optimizer.step()
    return gradients


def both_ways(rank: int, build: Callable[[], nn.Module], program: Any = None, **options: Any) -> int:
    """Train with plain DDP and with a wire; the gradients must be equal in every bit. Returns buckets."""
    plain = train(DDP(build(), **options), rank)
    wired = DDP(build(), **options)
    wire = thinwire.attach(wired, program or thinwire.Exact())
    for step, (expected, got) in enumerate(zip(plain, train(wired, rank), strict=True)):
        assert torch.equal(expected, got), (
            f"step {step} of {options} differs by {(expected - got).abs().max()}"
        )
    last = wire.stats().last
    return len(last.ops) if last else 0


def modes(rank: int, world_size: int) -> None:
    both_ways(rank, mlp)
    assert both_ways(rank, mlp, bucket_cap_mb=TINY_BUCKETS) > 5
    for as_view in (True, False):
        tiny = {"bucket_cap_mb": TINY_BUCKETS, "gradient_as_bucket_view": as_view}
        both_ways(rank, mlp, **tiny)
        both_ways(rank, mlp, static_graph=True, **tiny)
        both_ways(rank, mlp, find_unused_parameters=True, **tiny)
        both_ways(rank, mlp, program=Staged(), **tiny)
        both_ways(rank, mlp, program=Staged(), static_graph=True, **tiny)


class TwiceUnderAutocast(nn.Module):
    """Uses its first weight twice in a forward under bf16 autocast, which casts it once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            once = self.layers[0](x)
            out: torch.Tensor = self.layers[0](self.layers(once).tanh())
        return out.float()


def under_autocast(rank: int, world_size: int) -> None:
    for _ in range(5):
        both_ways(rank, TwiceUnderAutocast, bucket_cap_mb=TINY_BUCKETS)


def test_weights_used_twice_under_autocast_train_as_in_plain_ddp() -> None:
    run_ranks(under_autocast, 2)


class TwoDtypes(nn.Module):
    """Small, and in two buckets from the first step on: DDP's first ones are of one dtype each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)).double()).float()
        return out


def static_graphs(rank: int, world_size: int) -> None:
    """In their first backward DDP calls all buckets number 0, and none the last."""
    for program in (thinwire.Exact(), Staged()):
        both_ways(rank, TwoDtypes, program=program, static_graph=True)
    ddp = DDP(TwoDtypes(), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = thinwire.attach(ddp, thinwire.LocalSGD(period=2, warmup_steps=1), optimizer=optimizer)
    for step in range(4):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
        assert wire.step == step + 1


def test_static_graphs_of_several_buckets() -> None:
    run_ranks(static_graphs, 2)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_modes(world_size: int) -> None:
    run_ranks(modes, world_size)


class Branching(nn.Module):
    """Each rank uses another branch; the third is used by nobody."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.branches[self.rank % 2](x))
        return result


def unused(rank: int, world_size: int) -> None:
    for as_view in (True, False):
        for program in (thinwire.Exact(), Staged()):
            both_ways(
                rank,
                lambda: Branching(rank),
                program=program,
                find_unused_parameters=True,
                gradient_as_bucket_view=as_view,
                bucket_cap_mb=TINY_BUCKETS,
            )


def test_unused_parameters_that_differ_by_rank() -> None:
    run_ranks(unused, 2)


def accumulation(rank: int, world_size: int, program: thinwire.Program) -> None:
    plain, wired = (DDP(mlp(), bucket_cap_mb=TINY_BUCKETS) for _ in range(2))
    wire = thinwire.attach(wired, program)
    for ddp in (plain, wired):
        for step in range(6):
            if step % 3 != 2:
                with ddp.no_sync():
                    ddp(batch(rank, step)).square().mean().backward()
            else:
                ddp(batch(rank, step)).square().mean().backward()
    assert torch.equal(flat_gradients(plain.module), flat_gradients(wired.module))
    assert wire.step == wire.stats().steps == 2


@pytest.mark.parametrize("program", [thinwire.Exact(), Staged()])
def test_accumulation_under_no_sync_does_not_communicate(program: thinwire.Program) -> None:
    run_ranks(accumulation, 2, program)


def uneven(rank: int, world_size: int, program: thinwire.Program) -> torch.Tensor:
    final = []
    for attached in (False, True):
        ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
        if attached:
            thinwire.attach(ddp, program, check_every=2)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with Join([ddp]):
            for step in range(3 + 2 * rank):
                optimizer.zero_grad()
                ddp(batch(rank, step)).square().mean().backward()
                optimizer.step()
        final.append(flat_parameters(ddp.module))
    assert torch.equal(*final)
    return final[1]


@pytest.mark.parametrize("program", [thinwire.Exact(), Staged()])
def test_uneven_inputs_with_join(program: thinwire.Program) -> None:
    results = run_ranks(uneven, 3, program)
    assert all(torch.equal(result, results[0]) for result in results)


def uneven_and_troubled(rank: int, world_size: int, options: dict[str, Any], bad: int) -> Any:
    """Rank 0 runs out of inputs; afterwards a step overflows, and audits find something."""
    ddp = DDP(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = thinwire.attach(ddp, thinwire.Int4(), optimizer=optimizer, **options)
    with Join([ddp]):
        for step in range(3 if rank == 0 else 7):
            optimizer.zero_grad()
            factor = math.nan if step == bad else 1.0
            (ddp(batch(rank, step)).square().mean() * factor).backward()
            optimizer.step()
    audits = [(audit.step, audit.action) for audit in wire.audits()]
    return wire.step, wire.stats().overflows, audits, wire.program, flat_parameters(ddp.module).tolist()


@pytest.mark.parametrize("bad", [4, 6])
@pytest.mark.parametrize(
    "options",
    [
        {"check_every": 2},
        {"audit_every": 2},
        {"audit_every": 4, "max_error": 1e-9, "on_excess": thinwire.Exact()},
    ],
    ids=str,
)
def test_a_rank_without_inputs_goes_along_with_overflows_and_audits(
    options: dict[str, Any], bad: int
) -> None:
    one, other = run_ranks(uneven_and_troubled, 2, options, bad)
    assert one == other
    assert one[:2] == (6, 1)


class Detour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, *, detour: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        return self.second(hidden) if detour else hidden


def owed_to_unused(rank: int, world_size: int, to_none: bool) -> None:
    """What is owed to a parameter that no rank used stays, however gradients were zeroed."""
    ddp = DDP(Detour(), find_unused_parameters=True)
    wire = thinwire.attach(ddp, thinwire.Int4())
    owed: list[list[torch.Tensor]] = []
    for detour in (True, False, True):
        ddp.zero_grad(set_to_none=to_none)
        ddp(batch(rank, len(owed)), detour=detour).square().mean().backward()
        memory = own(wire.state_dict())["memory"]
        owed.append([memory[name]["residual"] for name in ("first.weight", "second.weight")])
    assert torch.equal(owed[0][1], owed[1][1])
    assert not torch.equal(owed[1][1], owed[2][1])
    assert not torch.equal(owed[0][0], owed[1][0])


@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_owed_to_unused_parameters_stays(to_none: bool) -> None:
    run_ranks(owed_to_unused, 2, to_none)


def stepped_in_backward(rank: int, world_size: int) -> None:
    """Gradients are dropped at the end of backward: that does not mean that nobody used the parameters."""
    for static in (True, False):
        ddp = DDP(mlp(), find_unused_parameters=not static, static_graph=static)
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        register_optimizer_overlap(ddp, optimizer, powerSGD_hook, state)
        ddp(batch(rank, 0)).square().mean().backward()
        assert len(state.error_dict) == len(state.q_memory_dict) == 6


def test_errors_are_fed_back_where_optimizers_step_in_backward() -> None:
    run_ranks(stepped_in_backward, 2)


def two_models(rank: int, world_size: int) -> None:
    """Both in one loss, so that their buckets come interleaved."""

    def run(attached: bool) -> list[torch.Tensor]:
        models = [DDP(mlp(seed=seed), bucket_cap_mb=TINY_BUCKETS) for seed in (1, 2)]
        wires = [thinwire.attach(model, Staged()) for model in models] if attached else []
        for step in range(4):
            outputs = [model(batch(rank, step)) for model in models]
            (outputs[0] * outputs[1]).sum().backward()
        assert all(wire.step == 4 for wire in wires)
        return [flat_gradients(model.module) for model in models]

    for expected, got in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, got)


def test_two_models_in_one_process() -> None:
    run_ranks(two_models, 2)


def checkpointed(rank: int, world_size: int) -> None:
    """Reentrant checkpoints run backward inside backward, so a bucket may fill in a nested one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([mlp(layers=2, seed=seed) for seed in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            return x

    def inputs(rank: int, step: int) -> torch.Tensor:
        return batch(rank, step).requires_grad_()

    plain, wired = (DDP(Net(), bucket_cap_mb=TINY_BUCKETS, static_graph=True) for _ in range(2))
    thinwire.attach(wired, Staged())
    for expected, got in zip(train(plain, rank, make=inputs), train(wired, rank, make=inputs), strict=True):
        assert torch.equal(expected, got)


def test_reentrant_checkpointing() -> None:
    run_ranks(checkpointed, 2)
