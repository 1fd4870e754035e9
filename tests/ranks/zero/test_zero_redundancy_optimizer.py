"""ZeroRedundancyOptimizer on real ranks: plain DDP's numbers, states that load anywhere, errors, no hangs."""

import copy
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.engine.comm.borrowed_group import BorrowedGroup
from thinwire.errors import MismatchError, WireError
from thinwire.optim import ZeroRedundancyOptimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its neighbours compile with what torch itself has deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer as Torchs

WIDTH = 12


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, call: Any = None) -> torch.Tensor:
    for step in steps:
        optimizer.zero_grad()
        (call or model)(batch(rank, step, WIDTH)).square().mean().backward()
        optimizer.step()
    return flat_parameters(model)


def test_plain_ddp_and_states_in_every_direction() -> None:
    run_ranks(check_states, 3)


def check_states(rank: int, world_size: int) -> None:
    pair = dist.new_group([1, 2])
    for optimizer_class, options in [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
    ]:
        check_plain(rank, optimizer_class, options)
        check_round_trips(rank, optimizer_class, options)
        check_other_world_size(rank, pair, optimizer_class, options)


def check_plain(rank: int, optimizer_class: Any, options: dict[str, Any]) -> None:
    """Spreading the state changes no bit of the training."""
    models = [mlp(WIDTH, layers=3) for _ in range(2)]
    optimizers = [
        optimizer_class(models[0].parameters(), **options),
        ZeroRedundancyOptimizer(models[1].parameters(), optimizer_class, **options),
    ]
    plain, sharded = (
        train(model, optimizer, rank, range(20), DDP(model))
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    assert torch.equal(plain, sharded)
    assert not torch.equal(plain, flat_parameters(mlp(WIDTH, layers=3)))
    owned = sum(len(group["params"]) for group in optimizers[1].optim.param_groups)
    assert len(optimizers[1].state) == owned < len(list(models[1].parameters()))


def check_round_trips(rank: int, optimizer_class: Any, options: dict[str, Any]) -> None:
    """From each of ours, torch's and the plain one to each, and on to the same parameters."""

    def make(kind: Any, model: nn.Module) -> Any:
        if kind is None:
            return optimizer_class(model.parameters(), **options)
        return kind(model.parameters(), optimizer_class, **options)

    ends = []
    for source in (ZeroRedundancyOptimizer, Torchs, None):
        model = mlp(WIDTH, layers=2)
        optimizer = make(source, model)
        train(model, optimizer, rank, range(4), DDP(model))
        if source is not None:
            optimizer.consolidate_state_dict(to=1)
        shared = [optimizer.state_dict() if rank == 1 or source is None else None]
        dist.broadcast_object_list(shared, src=1)
        for target in (ZeroRedundancyOptimizer, Torchs, None):
            again = copy.deepcopy(model)
            resumed = make(target, again)
            saved = copy.deepcopy(shared[0])
            resumed.load_state_dict(saved)
            ends.append(train(again, resumed, rank, range(4, 8), DDP(again)))
            if target is ZeroRedundancyOptimizer:
                assert repr(saved) == repr(shared[0]), "the caller's state was changed"
        ends.append(train(model, optimizer, rank, range(4, 8), DDP(model)))
    assert all(torch.equal(ends[0], end) for end in ends)


def check_other_world_size(rank: int, pair: Any, optimizer_class: Any, options: dict[str, Any]) -> None:
    """Three ranks save shards; two of them, whose ranks in their group are others, go on with the same."""
    model = mlp(WIDTH, layers=2)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    train(model, zero, 0, range(4))  # the same data everywhere, in place of DDP
    buffer = io.BytesIO()
    torch.save(zero.sharded_state_dict(), buffer)
    buffers: list[Any] = [None] * 3
    dist.all_gather_object(buffers, buffer.getvalue())
    shards = [torch.load(io.BytesIO(each), weights_only=True) for each in buffers]
    assert len({key for shard in shards for key in shard["state"]}) == sum(
        len(shard["state"]) for shard in shards
    )
    before = copy.deepcopy(model)
    end = train(model, zero, 0, range(4, 8))
    if rank == 0:
        return
    fewer = ZeroRedundancyOptimizer(before.parameters(), optimizer_class, process_group=pair, **options)
    assert (fewer.rank, fewer.global_rank, fewer.world_size) == (rank - 1, rank, 2)
    assert fewer.join_process_group is pair
    with pytest.raises(ValueError, match="list of all"):
        fewer.load_sharded_state_dict(shards[rank])
    fewer.load_sharded_state_dict(shards[::-1])
    assert torch.equal(train(before, fewer, 0, range(4, 8)), end)
    fewer.consolidate_state_dict(to=1)
    assert bool(fewer._all_state_dicts) == (rank == 2)
    if rank == 2:
        plain = optimizer_class(before.parameters(), **options)
        plain.load_state_dict(fewer.state_dict())
        assert len(plain.state) == len(list(before.parameters()))


def test_odd_set_ups(tmp_path: Path) -> None:
    run_ranks(check_odd_set_ups, 3, tmp_path)


def check_odd_set_ups(rank: int, world_size: int, directory: Path) -> None:
    check_mismatch(rank)
    check_kinds_of_parameters(rank)
    check_thawing(rank)
    check_closures(rank)
    check_scaler(rank)
    check_memory(rank)
    check_checkpoint(rank, directory)


def check_mismatch(rank: int) -> None:
    """Raised on every rank, with what differs, before anything is sent."""
    widths = {0: 4, 1: 4, 2: 5}
    with pytest.raises(MismatchError, match=r"parameter 0.*ranks 0, 1.*rank 2"):
        ZeroRedundancyOptimizer(nn.Linear(widths[rank], 3).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(MismatchError, match=r"lr of group 0: 0\.1 on rank 0"):
        ZeroRedundancyOptimizer(nn.Linear(3, 3).parameters(), torch.optim.SGD, lr=0.1 * (1 + rank))
    zero = ZeroRedundancyOptimizer(nn.Linear(3, 3).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(MismatchError, match="parameter 2"):
        zero.add_param_group({"params": nn.Linear(3 + rank, 1).parameters()})


def check_kinds_of_parameters(rank: int) -> None:
    """Several dtypes and layouts, in few broadcasts, and in the same memory."""
    sent: list[Any] = []
    issue = BorrowedGroup.issue

    def noting(self: BorrowedGroup, op: Any, turn: Any = None) -> Any:
        sent.append(op)
        return issue(self, op, turn)

    BorrowedGroup.issue = noting  # type: ignore[assignment, method-assign]
    for views in (False, True):
        torch.manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(9, dtype=torch.float64)),
            nn.Parameter(torch.randn(7, dtype=torch.bfloat16)),
            *(nn.Parameter(torch.randn(1)) for _ in range(6)),
        ]
        plain = [each.detach().clone() for each in parameters]
        options: dict[str, Any] = {"lr": 0.1, "fused": True}
        zero = ZeroRedundancyOptimizer(
            parameters, torch.optim.Adam, parameters_as_bucket_view=views, **options
        )
        local = torch.optim.Adam(plain, **options)
        places = [each.data_ptr() for each in parameters]
        for _ in range(3):
            for each in [*parameters, *plain]:
                each.grad = torch.ones_like(each)
            zero.step()
            local.step()
        kinds = {(zero._param_to_rank[each], each.dtype) for each in parameters}
        assert len(sent) == 3 * len(kinds) < 3 * len(parameters)
        assert sum(op.nbytes for op in sent) == 3 * sum(each.nbytes for each in parameters)
        assert [each.data_ptr() for each in parameters] == places
        assert parameters[0].is_contiguous(memory_format=torch.channels_last)
        assert all(torch.equal(*each) for each in zip(parameters, plain, strict=True))
        sent.clear()
    BorrowedGroup.issue = issue  # type: ignore[method-assign]


def check_thawing(rank: int) -> None:
    """What is frozen stays at home; what becomes trainable travels, and what is frozen again stays equal."""
    logger = logging.getLogger("thinwire.optim.zero_redundancy_optimizer")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.propagate = False
    for views in (False, True):
        model = mlp(WIDTH, layers=2)
        model[0].requires_grad_(False)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, parameters_as_bucket_view=views, **options
        )
        plain_model = copy.deepcopy(model)
        plain = torch.optim.SGD(plain_model.parameters(), **options)
        for frozen in (True, False, True):
            for each, optimizer in ((model, zero), (plain_model, plain)):
                each[0].requires_grad_(not frozen)
                for step in range(2):
                    each(batch(0, step, WIDTH)).square().mean().backward()  # gradients stay, also when frozen
                    optimizer.step()
            assert torch.equal(flat_parameters(model), flat_parameters(plain_model))
        moving = sum(each.numel() for buckets in zero._buckets for some in buckets for each in some)
        assert moving == flat_parameters(model).numel()
        assert len(messages) == 2
        messages.clear()
    logger.removeHandler(handler)


def check_closures(rank: int) -> None:
    """Every rank evaluates once and has its loss back, also one that owns nothing."""
    weight = nn.Parameter(torch.ones(2))
    zero = ZeroRedundancyOptimizer([weight], torch.optim.Adam, lr=0.1)
    assert zero._param_to_rank == {weight: 0}
    assert zero._param_to_index == {weight: 0}
    calls = []

    def closure() -> float:
        calls.append(rank)
        weight.grad = torch.ones(2)
        return 7.0 + rank

    assert zero.step(closure) == 7.0 + rank
    assert calls == [rank]
    assert torch.equal(weight, torch.full((2,), weight[0].item()))
    assert weight[0] < 0.95


def check_scaler(rank: int) -> None:
    """Gradients overflow on rank 1 alone: it keeps what it owns, still takes part, and all stay equal."""
    for fused in (False, True):
        model = mlp(WIDTH, layers=2)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(model(batch(0, 0, WIDTH)).square().mean()).backward()
        own = [each for each, owner in zero._param_to_rank.items() if owner == 1]
        before = [each.detach().clone() for each in model.parameters()]
        if rank == 1:
            own[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(zero)
        scaler.update()
        assert scaler.get_scale() == (32.0 if rank == 1 else 64.0)
        for each, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(each, old) == any(each is one for one in own)
        everybody: list[Any] = [None] * 3
        dist.all_gather_object(everybody, flat_parameters(model))
        assert all(torch.equal(everybody[0], each) for each in everybody)


class LiveBytes(TorchDispatchMode):
    """The most memory that tensors made meanwhile had at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                storage = each.untyped_storage()
                if storage._cdata not in old:
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._known = {key: each for key, each in self._known.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._known.values()))
        return made


def check_memory(rank: int) -> None:
    """Others hold one batch of a shard at a time, the receiver the whole and one batch."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    zero.step()
    whole = 2 * sum(each.nbytes for each in model.parameters())
    shard = whole / 3
    with LiveBytes() as live:
        zero.consolidate_state_dict(to=0)
    room = 0.3 * shard  # descriptions, and shards are not quite equal
    held = whole if rank == 0 else 0
    assert held + 0.5 * shard < live.peak < held + shard + room, "a batch here is a whole shard"


def check_checkpoint(rank: int, directory: Path) -> None:
    """torch.distributed.checkpoint keeps every rank's part, though ranks' keys meet in one directory."""

    def trained(steps: int) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = mlp(WIDTH, layers=3)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01 * steps)
        train(model, zero, 0, range(steps))
        return model, zero

    _, zero = trained(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        dcp.save({"zero": zero.sharded_state_dict()}, checkpoint_id=directory)
        _, other = trained(1)
        loaded = {"zero": other.sharded_state_dict()}
        assert repr(loaded["zero"]) != repr(zero.sharded_state_dict())
        dcp.load(loaded, checkpoint_id=directory)
    other.load_sharded_state_dict(loaded["zero"])
    assert repr(other.sharded_state_dict()) == repr(zero.sharded_state_dict())
    assert other.param_groups[0]["lr"] == 0.05


def test_only_one_rank_thaws() -> None:
    run_ranks(check_only_one_rank_thaws, 2, group_timeout=6)


def check_only_one_rank_thaws(rank: int, world_size: int) -> None:
    """An error on both, not an abort in the backend."""
    model = mlp(WIDTH, layers=2)
    model[0].requires_grad_(False)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(model, zero, 0, range(1))
    model[0].requires_grad_(rank == 1)
    with pytest.raises(WireError, match="rank 0" if rank == 1 else "did not make the same call"):
        train(model, zero, 0, range(1))
