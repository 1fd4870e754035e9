"""Training loops that are not plain: skipped steps, closures, errors, swaps and evaluations in between."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import COMPLEX, batch, flat_parameters, mlp, own
from thinwire import DiLoCo, Exact, Int4, Int8, LocalSGD
from thinwire.checkpoint.trees import copied
from thinwire.engine.pack import real_numbers


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    result: torch.Tensor = model(batch(rank, step, width=8)).square().mean()
    return result


def attached(policy: Any, make: Any = None, **options: Any) -> tuple[DDP, Any, Any]:
    ddp = DDP(mlp(width=8, layers=3))
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.2)))(ddp.parameters())
    return ddp, optimizer, thinwire.attach(ddp, policy, optimizer=optimizer, **options)


def same_everywhere(ddp: DDP) -> bool:
    own = flat_parameters(ddp.module)
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return all(torch.equal(other, found[0]) for other in found)


def step(ddp: DDP, optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss(ddp, rank, number).backward()
    optimizer.step()


def closures(rank: int) -> None:
    """Closures run as often as the optimizer likes, differently on every rank; resume and swap work."""
    for policy in (DiLoCo(2, overlap=1), LocalSGD(2)):

        def lbfgs(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2 + rank)

        def train(ddp: DDP, optimizer: Any, begin: int, end: int) -> None:
            for number in range(begin, end):

                def closure(number: int = number) -> torch.Tensor:
                    optimizer.zero_grad()
                    result = loss(ddp, rank, number)
                    result.backward()
                    return result

                optimizer.step(closure)

        ddp, optimizer, wire = attached(policy, lbfgs)
        train(ddp, optimizer, 0, 5)
        saved = [ddp.module.state_dict(), optimizer.state_dict(), wire.state_dict()]
        saved = [copied(one) for one in saved]
        train(ddp, optimizer, 5, 8)
        wire.finalize()
        expected = flat_parameters(ddp.module)
        ddp, optimizer, wire = attached(policy, lbfgs)
        ddp.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        wire.load_state_dict(saved[2])
        train(ddp, optimizer, 5, 8)
        wire.finalize()
        assert torch.equal(flat_parameters(ddp.module), expected)
        assert same_everywhere(ddp)
        wire.swap(Exact())
        optimizer.param_groups[0].update(max_iter=2, max_eval=4)
        train(ddp, optimizer, 8, 11)
        assert same_everywhere(ddp), "the state of LBFGS cannot be averaged, so it starts anew"


def skips(rank: int) -> None:
    """A GradScaler skips on one rank where an average is due; the loop logs, saves and swaps as usual."""
    ddp, optimizer, wire = attached(DiLoCo(2, program=Int8()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(8):
        optimizer.zero_grad()
        scaler.scale(loss(ddp, rank, number)).backward()
        if rank == 1 and number in (1, 5):
            next(ddp.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        dist.all_reduce(torch.ones(1))
        state = wire.state_dict()
        if number == 5:
            wire.load_state_dict(state)
    wire.swap(LocalSGD(3))
    for number in range(4):  # skipped by the loop itself, on one rank
        optimizer.zero_grad()
        loss(ddp, rank, number).backward()
        if rank == 0 or number != 2:
            optimizer.step()
    wire.finalize()
    assert same_everywhere(ddp)


def skipped_before_a_swap(rank: int) -> None:
    ddp, optimizer, wire = attached(LocalSGD(2))
    for number in range(2):
        optimizer.zero_grad()
        loss(ddp, rank, number).backward()
        if rank == 0 or number == 0:
            optimizer.step()
    wire.swap(Exact())
    assert same_everywhere(ddp)


def errors(rank: int) -> None:
    """An error in one rank's closure does not put it out of step."""
    ddp, optimizer, wire = attached(LocalSGD(2))
    for number in range(5):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            result = loss(ddp, rank, number)
            result.backward()
            if rank == 1 and number == 2:
                raise ValueError("bad batch")
            return result

        try:
            optimizer.step(closure)
        except ValueError as error:
            assert str(error) == "bad batch"  # noqa: PT017 - on one rank, once
    wire.finalize()
    assert own(wire.state_dict())["averaging"]["step"] == 5
    assert same_everywhere(ddp)


def interrupted(rank: int) -> None:
    """Ctrl-C while a rank waits for an average: what it saves then still has the average under way."""
    ddp, optimizer, wire = attached(DiLoCo(2))
    step(ddp, optimizer, rank, 0)
    if rank == 1:
        settle = wire._runner.strategy.membership._engine.settle

        def interrupt(which: Any = None) -> None:
            wire._runner.strategy.membership._engine.settle = settle
            raise KeyboardInterrupt

        wire._runner.strategy.membership._engine.settle = interrupt
        with pytest.raises(KeyboardInterrupt):
            step(ddp, optimizer, rank, 1)
        assert len(own(wire.state_dict())["averaging"]["in_flight"]) == 1
    else:
        step(ddp, optimizer, rank, 1)
    for number in range(2, 5):
        step(ddp, optimizer, rank, number)
    wire.finalize()
    assert same_everywhere(ddp)


def refused_swaps(rank: int) -> None:
    ddp, optimizer, wire = attached(LocalSGD(2))
    with pytest.raises(thinwire.OptionError, match="groups 3 ranks, and the model has 2"):
        wire.swap(LocalSGD(2, within=[[0], [1, 2]]))
    alone = dist.new_group([0])
    with pytest.raises(thinwire.MismatchError, match="is not what those ranks gave"):
        wire.swap(LocalSGD(2, within=dist.group.WORLD if rank else alone))
    for number in range(2):
        step(ddp, optimizer, rank, number)
    assert same_everywhere(ddp), "the old way of averaging goes on"


def applied_by_swaps(rank: int) -> None:
    """Models that are equal become less the mean residual of their exchanges, and it is dropped."""
    ddp, optimizer, wire = attached(DiLoCo(2, program=Int4()))
    for number in range(4):
        step(ddp, optimizer, rank, number)
    residual = own(wire.state_dict())["memory"]["0.weight"]["models: residual"]
    assert residual.abs().max() > 0
    before = ddp.module[0].weight.detach().clone()
    dist.all_reduce(residual)
    assert not ddp.broadcast_buffers
    wire.swap(LocalSGD(2))
    torch.testing.assert_close(ddp.module[0].weight.detach(), before - residual / 2, rtol=1e-6, atol=1e-7)
    wire.swap(Exact())
    assert ddp.broadcast_buffers, "as it was"
    assert not own(wire.state_dict())["memory"].get("0.weight")
    step(ddp, optimizer, rank, 4)
    assert same_everywhere(ddp)


def evaluations(rank: int) -> None:
    ddp, optimizer, wire = attached(DiLoCo(2))
    for number in range(4):
        optimizer.zero_grad()
        loss(ddp, rank, number).backward()
        loss(ddp, rank, 99)  # with gradients, between backward and step
        optimizer.step()
    with torch.inference_mode():
        wire.finalize()
    assert same_everywhere(ddp), "the last step came after the last average"
    for number in range(3):
        step(ddp, optimizer, rank, number)
    wire.finalize()
    assert same_everywhere(ddp)


def unfrozen(rank: int) -> None:
    ddp = DDP(mlp(width=8, layers=3))
    first = next(ddp.parameters())
    first.requires_grad_(False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = thinwire.attach(ddp, LocalSGD(2), optimizer=optimizer)
    first.requires_grad_(True)
    with pytest.raises(thinwire.AttachError, match=r"'0.weight' was frozen .*swap"):
        loss(ddp, rank, 0)
    wire.swap(LocalSGD(2))
    for number in range(2):
        step(ddp, optimizer, rank, number)
    assert same_everywhere(ddp)


class Odd(nn.Module):
    """Parameters of every kind, and buffers that are the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bf16 = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.pairs = nn.Parameter(torch.randn(2, dtype=COMPLEX))
        self.single = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0))
        self.register_buffer("constant", torch.randn(64))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = [self.bf16.float(), self.pairs.abs(), self.single.view(1), self.nothing]
        total: torch.Tensor = torch.stack([(x.sum() - number).square().sum() for number in numbers]).sum()
        return total


def odd_parameters(rank: int) -> None:
    for policy in (LocalSGD(2), DiLoCo(2, fragments=2, overlap=1), LocalSGD(2, optimizer_state="mean")):
        ddp = DDP(Odd())
        constant = ddp.module.constant.clone()
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        wire = thinwire.attach(ddp, policy, optimizer=optimizer, check_every=1)
        for number in range(5):
            optimizer.zero_grad()
            ddp(batch(rank, number, width=3)).backward()
            optimizer.step()
        wire.finalize()
        assert torch.equal(ddp.module.constant, constant)
        both = real_numbers(ddp.module.pairs).clone()
        dist.broadcast(both, 0)
        assert torch.equal(real_numbers(ddp.module.pairs), both)


def drift(rank: int) -> None:
    """check_every looks at all of the model, however it is cut."""
    ddp, optimizer, wire = attached(DiLoCo(2, fragments=2), check_every=2)
    for number in range(3):
        step(ddp, optimizer, rank, number)
    if rank == 1:
        wire._runner.strategy.replica.anchors["0.weight"][0, 0] += 1
    with pytest.raises(thinwire.DriftError, match=r"parameter '0.weight' on rank 1"):
        step(ddp, optimizer, rank, 3)


def first_half(rank: int, world_size: int) -> None:
    for check in (closures, skips, skipped_before_a_swap, errors, interrupted):
        check(rank)


def second_half(rank: int, world_size: int) -> None:
    for check in (refused_swaps, applied_by_swaps, evaluations, unfrozen, odd_parameters, drift):
        check(rank)


@pytest.mark.parametrize("checks", [first_half, second_half])
def test_loops_that_are_not_plain(checks: Any) -> None:
    assert run_ranks(checks, 2) == [None, None]


def ruled(rank: int, world_size: int) -> None:
    """Rules are for what is exchanged while training; one model in the end is the exact mean."""
    ddp = DDP(mlp(layers=2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    rules = [("*", thinwire.Sign())]
    wire = thinwire.attach(ddp, thinwire.DiLoCo(period=4), optimizer=optimizer, rules=rules)
    for step in range(6):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    (exchange,) = [record for record in wire.stats().records if record.purpose == "models"]
    assert exchange.bytes_by_kind.keys() == {"AllToAll", "AllGather"}
    mean = flat_parameters(ddp.module).clone()
    dist.all_reduce(mean)
    wire.finalize()
    torch.testing.assert_close(flat_parameters(ddp.module), mean / world_size)


def test_rules_hold_for_models_and_not_for_the_last_mean() -> None:
    run_ranks(ruled, 2)


UNEVEN: list[tuple[Any, list[int], str]] = [
    (DiLoCo(4), [8, 6], "rank 0 averaging fragment 0 after step 8; rank 1 synchronising models"),
    (DiLoCo(4, program=Int4()), [6, 8], "rank 1 averaging fragment 0 after step 8"),
    (DiLoCo(2, overlap=1), [4, 5], "rank 1 synchronising models (finalize or swap) after step 5"),
    (LocalSGD(4), [7, 6], "rank 1 synchronising models (finalize or swap) after step 6"),
    (LocalSGD(4), [8, 9], "rank 0 synchronising models (finalize or swap) after step 8; rank 1"),
]


def uneven(rank: int, world_size: int) -> list[str]:
    """Ranks with different numbers of batches: what is raised, at the latest by finalize."""
    said = []
    for policy, batches, _ in UNEVEN:
        ddp, optimizer, wire = attached(policy)
        with pytest.raises(thinwire.MismatchError) as caught:  # noqa: PT012 - by whichever comes first
            for number in range(batches[rank]):
                step(ddp, optimizer, rank, number)
            wire.finalize()
        said.append(str(caught.value))
    return said


def test_ranks_with_uneven_batches_are_told_before_models_mix() -> None:
    one, other = run_ranks(uneven, 2)
    assert one == other
    for said, (_, _, expected) in zip(one, UNEVEN, strict=True):
        assert expected in said
