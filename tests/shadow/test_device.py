"""The shadow device reports what a GPU would get wrong, and nothing else."""

import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.shadow import device
from tests.shadow.device import SHADOW


def on_one_rank(function: Any) -> Any:
    return run_ranks(function, 1, backend=SHADOW)[0]


def missing_wait(rank: int, world: int) -> tuple[list[str], list[str]]:
    side = torch.get_device_module("shadow").Stream()
    x = torch.zeros(8, device="shadow").add(1)
    with torch.get_device_module("shadow").stream(side):
        x.mul_(2)
    without = device.races()
    device.reset()
    y = x.add(1)
    side.wait_stream(torch.accelerator.current_stream())
    with torch.get_device_module("shadow").stream(side):
        y.mul_(2)
    return without, device.races()


def test_work_on_two_streams_needs_an_event() -> None:
    without, with_event = on_one_rank(missing_wait)
    assert without
    assert re.search(r"mul reads on stream \d+ what aten::add writes on stream 0, and no event", without[0])
    assert with_event == []


def early_reuse(rank: int, world: int) -> tuple[list[str], list[str]]:
    streams = torch.get_device_module("shadow")
    side, found = streams.Stream(), []
    for recorded in (False, True):
        x = torch.ones(1000, device="shadow")
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            x.mul_(2)
        if recorded:
            x.record_stream(side)
        del x
        torch.ones(1000, device="shadow")
        found.append(device.races())
        device.reset()
    return found[0], found[1]


def test_freed_memory_is_reused_at_once_unless_the_stream_is_recorded() -> None:
    without, recorded = on_one_rank(early_reuse)
    assert without
    assert "was freed and is reused while" in without[0]
    assert recorded == []


def reads(rank: int, world: int) -> dict[str, int]:
    x = torch.arange(4.0, device="shadow")
    found = {}
    for name, read in {
        "an operation": lambda: x.add(1),
        "item": lambda: x[0].item(),
        "equal": lambda: torch.equal(x, x),
        "a mask": lambda: x[x > 1],
        "a blocking copy": lambda: torch.zeros(4).to("shadow"),
        "a non-blocking copy": lambda: torch.zeros(4).to("shadow", non_blocking=True),
    }.items():
        device.reset()
        read()  # type: ignore[no-untyped-call]
        found[name] = device.counts().get("host waits", 0)
    return found


def test_waits_of_the_host_are_counted() -> None:
    found = on_one_rank(reads)
    assert [name for name, count in found.items() if count] == ["item", "equal", "a mask", "a blocking copy"]


def late_copy(rank: int, world: int) -> tuple[bool, float]:
    x = torch.full((1,), 3.0, device="shadow")
    copied = x.to("cpu", non_blocking=True)
    early = bool(copied.isnan())
    torch.accelerator.current_stream().synchronize()
    return early, copied.item()


def test_a_copy_to_the_host_has_its_value_once_the_host_has_waited() -> None:
    assert on_one_rank(late_copy) == (True, 3.0)


def mixed(rank: int, world: int) -> str:
    try:
        torch.ones(2, device="shadow") + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return ""


def test_tensors_of_the_cpu_are_refused() -> None:
    assert "Expected all tensors to be on the same device" in on_one_rank(mixed)


def unawaited(rank: int, world: int) -> tuple[float, list[str], list[str]]:
    x = torch.full((4,), float(rank), device="shadow")
    dist.all_reduce(x, async_op=True).wait()
    total, ordered = x[0].item(), device.races()
    work = dist.all_reduce(x, async_op=True)
    x.add(1)
    early = device.races()
    work.wait()
    return total, ordered, early


def test_collectives_run_on_a_stream_of_their_group() -> None:
    for total, ordered, early in run_ranks(unawaited, 2, backend=SHADOW):
        assert total == 1.0
        assert ordered == []
        assert "aten::add reads" in early[0]
        assert "allreduce writes" in early[0]


def lost(rank: int, world: int) -> tuple[bool, str, bool]:
    group = dist.new_group(group_desc="lost")
    backend = group._get_backend(torch.device("shadow"))
    device.hang(group.group_name, after=1)
    x = torch.ones(4, device="shadow")
    dist.all_reduce(x, group=group)
    works = x.sum().item() == 4 * world
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    completed = work.is_completed()
    dist.all_reduce(torch.ones(4, device="shadow"))  # another group still works
    backend.abort()
    x.sum().item()
    return works, str(completed), work.is_completed()


def test_a_lost_rank_leaves_its_peers_streams_waiting_until_abort() -> None:
    assert run_ranks(lost, 2, backend=SHADOW, fresh=True) == [(True, "False", True)] * 2


def split(rank: int, world: int) -> tuple[bool, str]:
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = torch.device("shadow", 0)
    everybody = dist.new_group()  # every rank calls it
    x = torch.ones(1, device="shadow")
    dist.all_reduce(x, group=everybody)
    if rank == 0:
        try:
            dist.new_group([0], use_local_synchronization=True, timeout=timedelta(seconds=1))
        except dist.DistStoreError as error:
            return x.item() == world, str(error)
    return x.item() == world, ""


def test_a_bound_world_makes_every_group_a_collective_of_all_ranks() -> None:
    results = run_ranks(split, 2, backend=SHADOW, fresh=True)
    assert [works for works, _ in results] == [True, True]
    assert "timeout" in results[0][1].lower()
