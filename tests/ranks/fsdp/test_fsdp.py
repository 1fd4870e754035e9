"""FSDP2 models: what replicas exchange, against FSDP's own hybrid sharding on the same ranks."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire
from tests.harness import run_ranks
from tests.models import batch, mlp
from thinwire import DiLoCo, Exact, Int8, LocalSGD, OptionError, UnavailableError, WireError
from thinwire.engine.comm.process_group import store_of
from thinwire.models.fsdp.reduce_scatter import CompressedReduceScatter
from thinwire.step import runner

WIDTH = 9
"""Odd, so that two shards of a layer differ in size, and FSDP pads one of them."""


def site_mesh(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, width: int = WIDTH, layers: int = 3, **options: Any) -> Any:
    model = mlp(width=width, layers=layers)
    for layer in list(model)[:-2]:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss(model: nn.Module, rank: int, step: int, width: int = WIDTH) -> torch.Tensor:
    result: torch.Tensor = model(batch(rank, step, width=width)).float().square().mean()
    return result


def whole(model: nn.Module) -> torch.Tensor:
    parts: list[Any] = list(model.parameters())
    return torch.cat([one.full_tensor().detach().flatten() for one in parts])


def train(model: Any, rank: int, wire: Any = None, steps: int = 6, optimizer: Any = None) -> list[float]:
    """Micro-batches of both kinds, without and with reduction, and clipping by the norm over all shards."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(steps):
        for micro in range(3):
            model.set_requires_gradient_sync(micro > 0)
            loss(model, rank, 3 * step + micro).backward()
        if wire is None:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(norm.full_tensor().item())
        else:
            norms.append(wire.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
]


def beside_hybrid_sharding(rank: int, world_size: int) -> list[list[tuple[torch.Tensor, list[float]]]]:
    mesh, found = site_mesh(), []
    for options in OPTIONS:
        native = sharded(mesh, **options)
        row = [(train(native, rank), whole(native))]
        for program in (Exact(), Int8()):
            model = sharded(mesh["shard"], **options)
            wire = thinwire.attach(model, program, replicas=mesh["replicate"], check_every=2)
            row.append((train(model, rank, wire), whole(model)))
            assert wire.step == 12, "two of three micro-batches are reduced"
        found.append([(parameters, norms) for norms, parameters in row])
    return found


def test_replicas_train_as_with_hybrid_sharding() -> None:
    results = run_ranks(beside_hybrid_sharding, 4)
    for number, options in enumerate(OPTIONS):
        native, exact, int8 = results[0][number]
        assert torch.equal(exact[0], native[0]), f"{options}: two replicas have one sum in any order"
        assert exact[1] == native[1], "norms are over all shards"
        torch.testing.assert_close(int8[0], native[0], rtol=0.05, atol=0.03)
        for other in results[1:]:
            assert torch.equal(other[number][2][0], int8[0]), "no rank drifts"


def one_skips(rank: int, world_size: int) -> str:
    """The other shards of both replicas hear of it too."""
    runner._CHECK_EVERY = 4
    mesh = site_mesh()
    model = sharded(mesh["shard"])
    wire = thinwire.attach(model, Int8(), replicas=mesh["replicate"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        try:
            loss(model, rank, step).backward()
        except thinwire.ThinwireError as error:
            return f"{wire.step} {type(error).__name__}: {error}"
        if not (rank == 3 and step == 2):
            optimizer.step()
    return "no error"


def test_a_rank_that_skips_its_optimizer_step_alone_ends_all_shards() -> None:
    texts = run_ranks(one_skips, 4)
    assert all(text.startswith("4 ") for text in texts)
    for rank in (1, 3):  # the two that hold the same shard
        assert "DriftError" in texts[rank]
        assert "on rank 3 differs from that on rank 1" in texts[rank]


def one_replica(rank: int, world_size: int) -> None:
    mesh = site_mesh(replicas=1)
    plain, model = sharded(mesh["shard"]), sharded(mesh["shard"])
    wire = thinwire.attach(model, thinwire.Int4(), replicas=mesh["replicate"])
    assert train(plain, rank) == train(model, rank, wire)
    assert torch.equal(whole(plain), whole(model))


def test_one_replica_compresses_nothing() -> None:
    run_ranks(one_replica, 2)


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank adapter, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def fine_tuned(mesh: DeviceMesh, kind: str) -> Any:
    """A model some of whose parameters are frozen: each group's bias, whole groups, or all but adapters."""
    torch.manual_seed(0)
    layers = [Adapted() if kind == "adapters" else nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    frozen = {"biases": [f"{n}.bias" for n in (0, 2, 4)], "groups": ["2.weight", "2.bias", "0.bias"]}
    for name in frozen.get(kind, []):
        model.get_parameter(name).requires_grad_(False)
    for layer in layers[:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fine_tune(rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    """Fine-tunes with FSDP alone, Exact and Int8; later the frozen parameters train, and others freeze."""
    mesh, found = site_mesh(), {}
    for kind in ("biases", "groups", "adapters"):
        rows: list[tuple[Any, Any]] = [(fine_tuned(mesh, kind), None)]
        for program in (Exact(), Int8()):
            model = fine_tuned(mesh["shard"], kind)
            rows.append((model, thinwire.attach(model, program, replicas=mesh["replicate"], check_every=2)))
        for model, wire in rows:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            train(model, rank, wire, steps=2, optimizer=optimizer)
            for parameter in model.parameters():
                parameter.requires_grad_(not parameter.requires_grad)
            next(model.parameters()).requires_grad_(True)
            train(model, rank, wire, steps=2, optimizer=optimizer)
        found[kind] = [whole(model) for model, _ in rows]
    return found


@pytest.mark.slow
def test_frozen_parameters_train_as_with_hybrid_sharding_when_unfrozen_later_too() -> None:
    results = run_ranks(fine_tune, 4)
    for kind, (native, exact, int8) in results[0].items():
        assert torch.equal(exact, native), kind
        torch.testing.assert_close(int8, native, rtol=0.05, atol=0.03)
        for other in results[1:]:
            assert torch.equal(other[kind][2], int8), "no rank drifts"


def disagree_on_frozen(rank: int, world_size: int) -> list[str]:
    mesh, said = site_mesh(), []
    model = sharded(mesh["shard"])
    next(model.parameters()).requires_grad_(rank < 2)
    with pytest.raises(thinwire.MismatchError) as mismatch:
        thinwire.attach(model, Exact(), replicas=mesh["replicate"], timeout=20)
    said.append(str(mismatch.value))
    for before in (True, False):
        model = sharded(mesh["shard"])
        model[0].bias.requires_grad_(before)
        thinwire.attach(model, Exact(), replicas=mesh["replicate"], timeout=6)
        loss(model, rank, 0).backward()
        model[0].bias.requires_grad_(before if rank < 2 else not before)
        said.append(failure(loss(model, rank, 1).backward))
    return said


def failure(call: Callable[[], object], kind: type[Exception] = WireError) -> str:
    """The text of an error, without its traceback, which would keep the model."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


def test_replicas_that_freeze_different_parameters_raise() -> None:
    for said in run_ranks(disagree_on_frozen, 4):
        assert "option frozen: [] on" in said[0]
        assert "['0.weight'] on" in said[0]
        for text in said[1:]:
            assert "0.bias changed between frozen and trained" in text


def sends(rank: int, world_size: int) -> list[float]:
    mesh, ratios = site_mesh(), []
    for program in (Exact(), Int8(), thinwire.Int4()):
        model = sharded(mesh["shard"], width=64)
        wire = thinwire.attach(model, program, replicas=mesh["replicate"])
        for step in range(3):
            loss(model, rank, step, width=64).backward()
        stats = wire.stats()
        ratios.append(stats.ddp_bytes / stats.bytes_sent)
    return ratios


def test_programs_divide_the_bytes_between_replicas() -> None:
    for exact, int8, int4 in run_ranks(sends, 4):
        assert exact == pytest.approx(1.0)
        assert int8 > 3.4
        assert int4 > 6


def overflow(rank: int, world_size: int) -> tuple[int, bool, bool]:
    """Only the second shard of one replica overflows, and all ranks skip the step."""
    mesh = site_mesh()
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = thinwire.attach(model, Int8(), replicas=mesh["replicate"])
    loss(model, rank, 0).backward()
    optimizer.step()
    before = whole(model)
    optimizer.zero_grad()
    big = torch.full((WIDTH,), 3e38)
    big[:5] = 0.0  # rows of the first shard
    if rank == 3:
        (model(batch(rank, 1, width=WIDTH)) * big).sum().backward()
    else:
        loss(model, rank, 1).backward()
    spoilt = all(bool(one.grad.to_local().isnan().all()) for one in model.parameters())
    optimizer.step()
    return wire.step, spoilt, torch.equal(whole(model), before)


def test_an_overflow_in_one_shard_is_skipped_by_all() -> None:
    assert run_ranks(overflow, 4) == [(1, True, True)] * 4


def overflow_in_a_micro_batch(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """FSDP adds each micro-batch's gradients to the NaNs of the one before, after the exchange."""
    results = []
    for bad in (0, 1):
        mesh = site_mesh()
        model = sharded(mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        wire = thinwire.attach(model, Int8(), replicas=mesh["replicate"], optimizer=optimizer)
        before = whole(model)
        for micro in range(2):
            (loss(model, rank, micro) * (torch.inf if micro == bad and rank == 3 else 1.0)).backward()
        optimizer.step()
        assert not optimizer.state
        results.append((wire.stats().overflows, torch.equal(whole(model), before)))
        optimizer.zero_grad()
        loss(model, rank, 2).backward()
        optimizer.step()
        assert whole(model).isfinite().all()
        assert not torch.equal(whole(model), before)
    return results


def test_an_overflow_in_any_micro_batch_skips_the_step() -> None:
    assert run_ranks(overflow_in_a_micro_batch, 4) == [[(2, True), (1, True)]] * 4


def pass_over(model: nn.Module, rank: int, step: int) -> None:
    loss(model, rank, step).backward()


def one_evaluates_alone(rank: int, world_size: int) -> list[str]:
    """Rank 3's gathers meet those of rank 2's training, until both wait for each other in FSDP."""
    mesh = site_mesh()
    model = sharded(mesh["shard"])
    thinwire.attach(model, Int8(), replicas=mesh["replicate"], timeout=6)
    loss(model, rank, 0).backward()
    if rank == 3:
        with torch.no_grad():
            model(batch(rank, 9, width=WIDTH))
    said = []
    for step in (1, 2):
        with contextlib.suppress(AssertionError):
            said.append(failure(partial(pass_over, model, rank, step), RuntimeError))
    # A rank that leaves closes its connections, which the others may notice before they notice the wire.
    store = store_of(dist.distributed_c10d._get_default_group())
    store.set(f"rank {rank} is done", "")
    store.wait([f"rank {other} is done" for other in range(world_size)])
    return said


@pytest.mark.slow
def test_ranks_that_wait_in_fsdps_own_collectives_raise_too_when_the_wire_is_down() -> None:
    results = run_ranks(one_evaluates_alone, 4, group_timeout=600)
    for rank, other in ((0, 2), (1, 3)):
        assert f"rank {rank} waited" in results[rank][0]
        assert f"Rank {other} did not respond" in results[rank][0]
    for rank in (2, 3):
        assert len(results[rank]) == 2, "no rank hangs, and none trains on"
        assert "the exchange between replicas is down: rank" in results[rank][-1]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        result: torch.Tensor = self.left(x) if left else self.right(x)
        return result


def unused(rank: int, world_size: int) -> tuple[str, torch.Tensor]:
    """Replicas use different parameters: an error at first, then zeros, as FSDP gives them."""
    mesh, caught = site_mesh(), ""
    for flag in (False, True):
        model: Any = fully_shard(Branches(), mesh=mesh["shard"])
        wire = thinwire.attach(model, Exact(), replicas=mesh["replicate"], timeout=20)
        model.set_reduce_scatter_unused_params(flag)
        if flag:
            model(batch(rank, 0, width=WIDTH), rank < 2).square().mean().backward()
        else:
            with pytest.raises(WireError) as error:
                model(batch(rank, 0, width=WIDTH), rank < 2).square().mean().backward()
            caught = str(error.value)
        assert wire.step == int(flag)
    return caught, torch.cat([one.grad.full_tensor().flatten() for one in model.parameters()])


def test_unused_parameters_raise_or_count_as_zeros() -> None:
    results = run_ranks(unused, 4)
    assert all("set_reduce_scatter_unused_params(True)" in text for text, _ in results)
    assert all(torch.equal(gradients, results[0][1]) for _, gradients in results)
    assert results[0][1].abs().min() > 0, "each half is the other replica's"


def average(rank: int, world_size: int) -> list[torch.Tensor]:
    mesh, found = site_mesh(), []
    outer = lambda anchors: torch.optim.SGD(anchors, lr=1.0)  # noqa: E731
    for policy in (LocalSGD(2), LocalSGD(2, warmup_steps=2, optimizer_state="mean"), DiLoCo(2, outer=outer)):
        model = sharded(mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wire = thinwire.attach(model, policy, replicas=mesh["replicate"], optimizer=optimizer)
        for step in range(6):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        wire.finalize()
        assert wire.step == 6
        found.append(whole(model))
    return found


def local_sgd() -> torch.Tensor:
    """Two replicas, each with the batches of two ranks, averaged every other step."""
    models = [mlp(width=WIDTH, layers=3) for _ in range(2)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in models]
    for step in range(6):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            sum((loss(model, 2 * replica + shard, step) for shard in range(2)), torch.zeros(())).div(
                2
            ).backward()
            optimizer.step()
        if step % 2:
            for pair in zip(*(one.parameters() for one in models), strict=True):
                mean = torch.stack([one.detach() for one in pair]).mean(0)
                for one in pair:
                    one.data.copy_(mean)
    return torch.cat([one.detach().flatten() for one in models[0].parameters()])


def test_averaged_models_work_on_shards() -> None:
    results, expected = run_ranks(average, 4), local_sgd()
    for found in results:
        assert all(map(torch.equal, found, results[0]))
    for found in (results[0][0], results[0][2]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def refused(rank: int, world_size: int) -> list[str]:
    mesh, said = site_mesh(1, 2), []
    other = site_mesh(2, 1)

    def error(model: Any, replicas: Any, kind: type[Exception], **options: Any) -> None:
        with pytest.raises(kind) as caught:
            thinwire.attach(model, Int8(), replicas=replicas, **options)
        said.append(str(caught.value))

    error(sharded(mesh["shard"]), None, OptionError)
    error(sharded(mesh["shard"]), mesh, OptionError)
    error(sharded(mesh["shard"]), mesh["shard"], OptionError)
    error(sharded(mesh), mesh["replicate"], UnavailableError)
    in_backward = sharded(other["shard"])
    next(in_backward.parameters()).register_post_accumulate_grad_hook(lambda one: None)
    error(in_backward, other["replicate"], UnavailableError)
    twice = sharded(other["shard"])
    wire = thinwire.attach(twice, Int8(), replicas=other["replicate"])
    error(twice, other["replicate"], thinwire.AttachError)
    for call in (
        lambda: thinwire.save_checkpoint("x", twice, [], wire),
        lambda: thinwire.GatheredState(wire),
    ):
        with pytest.raises(UnavailableError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_what_cannot_work_is_refused_with_a_way_out() -> None:
    for said in run_ranks(refused, 2):
        ways = [
            "replicas=mesh['replicate']",
            "mesh['replicate']",
            "they may share this rank alone",
            "fully_shard(module, mesh=mesh['shard'])",
            "step the optimizer after backward",
            "wire.swap(program)",
            "dcp.save(",
            "dcp.save(",
        ]
        for way, text in zip(ways, said, strict=True):
            assert way in text


def ended_manually(rank: int, world_size: int) -> list[str]:
    """Sets the attribute that set_manual_backward_finalization of torch 2.15 sets."""
    mesh = site_mesh(2, 1)
    model = sharded(mesh["shard"])
    attach = partial(thinwire.attach, model, Int8(), replicas=mesh["replicate"])
    model._get_fsdp_state()._state_ctx.manual_backward_finalization = True
    said = [failure(attach, UnavailableError)]
    model._get_fsdp_state()._state_ctx.manual_backward_finalization = False
    wire = attach()
    loss(model, rank, 0).backward()
    model._get_fsdp_state()._state_ctx.manual_backward_finalization = True
    said.append(failure(loss(model, rank, 1).backward, UnavailableError))
    assert wire.step == 1
    return said


def test_a_backward_that_the_caller_ends_is_refused_at_attach_and_in_each_step() -> None:
    for said in run_ranks(ended_manually, 2):
        assert len(said) == 2
        assert all("model.set_manual_backward_finalization(False) on the root" in text for text in said)


def within(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Shards on a slow link: gradients are encoded within the one replica."""
    mesh, found = init_device_mesh("cpu", (world_size,)), []
    for codec in (None, thinwire.Quantize(bits=8)):
        model = sharded(mesh, width=64)
        sent = None if codec is None else thinwire.compress_reduce_scatter(model, codec)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            loss(model, rank, step, width=64).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model))
    assert sent is not None
    uncompressed = 4 * sum(one.numel() for one in model.parameters()) * 4 * (world_size - 1) // world_size
    return found[0], found[1], sent.bytes_sent, uncompressed


def owned(rank: int, world_size: int) -> None:
    codec = thinwire.Quantize(bits=4)
    reduce_scatter = CompressedReduceScatter(codec)
    gradients = [
        torch.randn(world_size, 40, generator=torch.Generator().manual_seed(one)) for one in range(3)
    ]
    found, group = torch.empty(40), dist.group.WORLD
    assert group is not None
    reduce_scatter(found, gradients[rank].flatten(), group, dist.ReduceOp.SUM)
    expected = gradients[rank][rank].clone()
    for other in range(world_size):
        if other != rank:
            codec.add(codec.encode(gradients[other][rank]), expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_owners_gradients_of_its_own_shard_are_not_rounded(world_size: int) -> None:
    run_ranks(owned, world_size)


def drawn(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    reduce_scatter = CompressedReduceScatter(thinwire.Quantize(bits=4, stochastic=True))
    gradients = torch.randn(world_size, world_size, 40, generator=torch.Generator().manual_seed(0))
    group, found = dist.group.WORLD, []
    assert group is not None
    for _ in range(200):
        found.append(torch.empty(40))
        reduce_scatter(found[-1], gradients[rank].flatten(), group, dist.ReduceOp.AVG)
    return torch.stack(found), gradients.mean(0)[rank]


def test_stochastic_codecs_draw_anew_in_every_call() -> None:
    for found, mean in run_ranks(drawn, 2):
        assert len(found.unique(dim=0)) == len(found)
        torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=0.15)


def test_shards_exchange_compressed_gradients() -> None:
    for plain, compressed, sent, uncompressed in run_ranks(within, 3):
        torch.testing.assert_close(compressed, plain, rtol=0.05, atol=0.02)
        assert not torch.equal(compressed, plain)
        assert sent < uncompressed / 3.4
