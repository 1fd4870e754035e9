"""thinwire's process groups on a device: how they are made and closed, and what a lost rank looks like."""

import gc
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.shadow import device
from tests.shadow.device import SHADOW
from thinwire import AllReduce
from thinwire.engine.comm import group_communicator, process_group
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine

LIMIT = 20.0


def world_on(where: torch.device | None) -> dist.ProcessGroup:
    """Return the default group, bound as `init_process_group(device_id=where)` does, or unbound."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = where
    return world


def small_model(where: object = "shadow") -> DDP:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    return DDP(layers.to(where), bucket_cap_mb=0.001)  # type: ignore[call-overload]


def backward(ddp: DDP) -> torch.Tensor:
    loss: torch.Tensor = ddp(torch.ones(3, 16, device=next(ddp.parameters()).device)).square().mean()
    loss.backward()
    return loss


def some_ranks(rank: int, world_size: int) -> list[float]:
    """Rank 1 takes part in no group of ranks 0 and 2, and calls nothing while they make it."""
    world = world_on(torch.device("shadow", 0))
    try:
        communicator = GroupCommunicator(world, timedelta(seconds=LIMIT), torch.device("shadow", 0))
        communicator.open()
        found = []
        if rank != 1:
            total = communicator.issue(AllReduce(torch.ones(2, device="shadow"), ranks=(0, 2))).wait()
            found = total.tolist()
        communicator.rendezvous.gather("done", "", timedelta(seconds=LIMIT))
        communicator.close()
    finally:
        world_on(None)
    return found


def test_a_group_of_some_ranks_needs_only_these_if_the_world_is_bound_to_a_device() -> None:
    """torch would split the world's communicator, which all ranks must do together."""
    assert run_ranks(some_ranks, 3, backend=SHADOW) == [[2.0, 2.0], [], [2.0, 2.0]]


def attached(rank: int, world_size: int) -> dict[str, Any]:
    """Attach on a device that is not the first, and train."""
    where, threads = torch.device("shadow", 1 + rank), []
    first = process_group._first_collective

    def seen(*given: Any) -> None:
        threads.append(torch.accelerator.current_device_index())
        first(*given)

    with torch.get_device_module(where).device(where):
        ddp = small_model(where)
        with patch.object(process_group, "_first_collective", seen):
            wire = thinwire.attach(
                ddp, thinwire.Int8()
            )  # without `timeout`: the backend's class has no options
        connected = device.counts().get("groups connected", 0)
        backward(ddp)
        later = device.counts().get("groups connected", 0) - connected
        communicator: Any = wire._runner.communicator
        bound = str(communicator._group.bound_device_id)
    return {"threads": threads, "bound": bound, "connected later": later, "races": device.races()}


def test_groups_are_bound_to_the_models_device_and_connected_by_attach() -> None:
    for rank, found in enumerate(run_ranks(attached, 2, backend=SHADOW)):
        assert found == {
            "threads": [1 + rank],
            "bound": f"shadow:{1 + rank}",
            "connected later": 0,
            "races": [],
        }


def across_nodes(rank: int, world_size: int) -> tuple[list[str], int, list[str]]:
    world_on(torch.device("shadow", 0))
    try:
        ddp = small_model()
        program = thinwire.AcrossNodes(thinwire.Int8(), node_size=2)
        wire = thinwire.attach(ddp, program, timeout=60)
        communicator: Any = wire._runner.communicator
        groups = sorted(str(ranks) for ranks in communicator._subgroups)
        connected = device.counts().get("groups connected", 0)
        backward(ddp)
        wire.finalize()
        return groups, device.counts().get("groups connected", 0) - connected, device.races()
    finally:
        world_on(None)


def test_the_groups_of_a_program_are_connected_by_attach() -> None:
    results = run_ranks(across_nodes, 4, backend=SHADOW)
    assert [groups for groups, _, _ in results] == [
        ["(0, 1)", "(0, 2)"],
        ["(0, 1)", "(1, 3)"],
        ["(0, 2)", "(2, 3)"],
        ["(1, 3)", "(2, 3)"],
    ]
    assert [(later, races) for _, later, races in results] == [(0, [])] * 4


def one_rank_dies(rank: int, world_size: int) -> str:
    ddp = small_model()
    thinwire.attach(ddp, thinwire.Int8(), timeout=6)
    backward(ddp)
    if rank == 1:
        os._exit(0)
    try:
        backward(ddp)
    except thinwire.WireError as error:
        return str(error)
    return ""


def test_a_rank_that_dies_is_named_in_time() -> None:
    """On NCCL its peers' collectives never fail: they never end, and the first read of a value blocks."""
    text, _ = run_ranks(one_rank_dies, 2, backend=SHADOW, dies={1})
    assert "Rank 1 did not respond" in text, text
    assert "did not end on the device within" in text
    assert "at step 1, bucket 0" in text


@dataclass(frozen=True)
class FailsOnRankOne:
    """A program that raises on one rank, in its second step."""

    def __call__(self, bucket: thinwire.Bucket, memory: thinwire.Memory) -> Any:
        mean = yield AllReduce(bucket.buffer / bucket.world_size)
        if bucket.step == 1 and bucket.rank == 1:
            device.hang()  # rank 1's own collectives end here, so those of its peer do, too
            raise KeyError("a defect")
        return thinwire.Outcome(mean)


def one_program_fails(rank: int, world_size: int) -> str:
    ddp = small_model()
    thinwire.attach(ddp, FailsOnRankOne(), timeout=600)
    backward(ddp)
    if rank == 0:
        device.hang(after=1)
    try:
        backward(ddp)
    except thinwire.ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_program_that_fails_on_one_rank_fails_the_others_before_the_limit() -> None:
    """NCCL's peers do not notice that a communicator was aborted elsewhere, and the limit is ten minutes."""
    found, own = run_ranks(one_program_fails, 2, backend=SHADOW, fresh=True)
    assert own.startswith("ProgramError: "), own
    assert found.startswith("WireError: "), found
    assert "Rank 1 failed: the program failed" in found, found


def reads_elsewhere(rank: int, world_size: int) -> tuple[str, int]:
    """The host reads a value of its own behind a collective that never ends."""
    world = world_on(None)
    communicator = GroupCommunicator(world, timedelta(seconds=6), torch.device("shadow", 0))
    communicator.open()
    engine = Engine(communicator, device=torch.device("shadow", 0))
    device.hang()

    def program() -> Any:
        return (yield AllReduce(torch.ones(2, device="shadow")))

    instead = torch.zeros(2, device="shadow")
    result = engine.submit(program(), step=0, label="bucket 0", last=True, instead=instead)
    result.wait()[0].item()  # blocks until the wire thread aborts the communicator
    text = ""
    try:
        engine.settle()
    except thinwire.WireError as error:
        text = str(error)
    engine.close()
    return text, device.counts().get("groups aborted", 0)


def test_a_host_that_reads_a_value_itself_is_woken_at_the_limit() -> None:
    for text, aborted in run_ranks(reads_elsewhere, 2, backend=SHADOW, fresh=True):
        assert "for AllReduce" in text, text
        assert aborted


def close_together(rank: int, world_size: int) -> list[bool]:
    """Rank 0 drops its model first. When it ends its group, rank 1 has dropped its own, too."""
    ddp, seen = small_model(), []
    wire = thinwire.attach(ddp, thinwire.Int8(), timeout=60)
    backward(ddp)
    rendezvous = wire._runner.communicator.rendezvous
    end = process_group.HiddenGroup.destroy

    def destroy(self: process_group.HiddenGroup) -> None:
        seen.append(rendezvous.store.check([f"thinwire/done/{other}" for other in range(world_size)]))
        end(self)

    with (
        patch.object(process_group.HiddenGroup, "destroy", destroy),
        patch.object(group_communicator, "_PART_LIMIT", timedelta(seconds=100)),
    ):
        time.sleep(0.3 * rank)
        del ddp, wire
    return seen


def test_ranks_that_close_together_wait_until_all_have_received_everything() -> None:
    """NCCL may still be sending what a rank's peer waits for, and an abort would stop it."""
    assert run_ranks(close_together, 2, backend=SHADOW) == [[True], [True]]


def close_first(rank: int, world_size: int) -> tuple[int, bool]:
    """Rank 1 drops its model while rank 0 keeps its own."""
    ddp = small_model()
    wire = thinwire.attach(ddp, thinwire.Int8(), timeout=60)
    backward(ddp)
    assert dist.group.WORLD is not None
    store = process_group._store(dist.group.WORLD)
    with (
        patch.object(dist, "destroy_process_group", side_effect=AssertionError("a collective")),
        patch.object(group_communicator, "_PART_LIMIT", timedelta(seconds=0.1)),
    ):
        if rank == 1:
            del ddp, wire
            store.set("dropped", "")
        else:
            store.wait(["dropped"], timedelta(seconds=100))
            del ddp, wire
    return device.counts().get("groups aborted", 0), device.races() == []


def test_a_model_that_one_rank_drops_first_runs_no_collective_to_close() -> None:
    """NCCL's destroy waits for the peers of the node, and the garbage collector would run it."""
    for aborted, clean in run_ranks(close_first, 2, backend=SHADOW):
        assert aborted
        assert clean


def destroyed_first(rank: int, world: int) -> tuple[int, int]:
    """End torch's groups before the model, as many scripts do."""
    ddp = small_model()
    thinwire.attach(ddp, thinwire.Int8(), timeout=LIMIT)
    backward(ddp)
    before = device.counts().get("groups aborted", 0)
    dist.destroy_process_group()
    del ddp
    gc.collect()
    after = device.counts().get("groups aborted", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the harness destroys it
    return before, after


def test_a_wire_that_outlives_torchs_own_groups_is_aborted_too() -> None:
    for before, after in run_ranks(destroyed_first, 2, backend=SHADOW, fresh=True):
        assert after > before
