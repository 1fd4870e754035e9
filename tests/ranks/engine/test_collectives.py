"""Every collective does on real ranks what `simulate` says, and costs the bytes the meter says."""

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from thinwire import AllGather, AllReduce, AllToAll, Await, Broadcast, Reduce, ReduceScatter, WireError
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.ops import Collective, Exchange
from thinwire.engine.simulate import exchange

SUMS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.complex64,
]
BYTES = [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn]

ROOT = Path(__file__).parents[3]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def operand(rank: int, size: int, dtype: torch.dtype, width: int = 5) -> torch.Tensor:
    numbers = torch.arange(size * width) % 7 + rank
    return numbers.view(size, width).to(dtype)


def kinds(tensor: torch.Tensor, size: int, dtype: torch.dtype) -> list[Collective]:
    moves = [AllGather(tensor), AllToAll(tensor), *(Broadcast(tensor.clone(), src) for src in range(size))]
    sums = [
        AllReduce(tensor.clone()),
        ReduceScatter(tensor),
        *(Reduce(tensor.clone(), d) for d in range(size)),
    ]
    return moves + (sums if dtype in SUMS else [])


def all_kinds(rank: int, size: int) -> None:
    communicator = GroupCommunicator(world())
    communicator.open()
    for dtype in SUMS + BYTES:
        tensors = [operand(r, size, dtype) for r in range(size)]
        everyone = zip(*(kinds(tensor, size, dtype) for tensor in tensors), strict=True)
        for op, ops in zip(kinds(tensors[rank], size, dtype), everyone, strict=True):
            expected = exchange(list(ops))[rank]
            received = communicator.issue(op).wait()
            if isinstance(op, Reduce) and op.dst != rank:
                continue
            assert received.dtype == dtype
            assert torch.equal(
                received.view(-1).to(torch.complex64), expected.view(-1).to(torch.complex64)
            ), op
    for empty in (AllReduce(torch.empty(0)), AllGather(torch.empty(0)), AllToAll(torch.empty(size, 0))):
        assert communicator.issue(empty).wait().numel() == 0
    communicator.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_real_ranks_do_what_simulate_says(size: int) -> None:
    run_ranks(all_kinds, size)


def futures(rank: int, size: int) -> None:
    communicator = GroupCommunicator(world(), timedelta(seconds=0.2))
    future: torch.futures.Future[int] = torch.futures.Future()
    pending = communicator.issue(Await(future))
    assert not pending.done()
    with pytest.raises(WireError, match="not completed in time"):
        pending.wait()
    future.set_result(5)
    assert pending.wait() == 5


def test_waiting_for_a_future_has_a_limit() -> None:
    run_ranks(futures, 1)


def device_bytes() -> int:
    """What has left over the loopback device of this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    raise AssertionError("no loopback device")


def uneven(rank: int, size: int) -> Exchange:
    """Rank r gets (r + 1) x 100,000 numbers from every other, and nothing from itself."""
    sends = tuple(0 if peer == rank else 100_000 * (peer + 1) for peer in range(size))
    receives = tuple(0 if peer == rank else 100_000 * (rank + 1) for peer in range(size))
    return Exchange(torch.ones(sum(sends)), sends=sends, receives=receives)


def metered(rank: int, size: int) -> list[tuple[str, int, int]]:
    """(collective, bytes by the meter on this rank, bytes on the device by all ranks)."""
    communicator = GroupCommunicator(world())
    communicator.open()
    tensor = torch.ones(size, 400_000)
    rows = []
    for op in (
        AllReduce(tensor),
        AllGather(tensor),
        AllToAll(tensor),
        ReduceScatter(tensor),
        Broadcast(tensor, 1),
        Reduce(tensor, 0),
        uneven(rank, size),
    ):
        communicator.issue(op).wait()  # connections are made
        dist.barrier()
        time.sleep(0.1)
        before = device_bytes()
        dist.barrier()
        for _ in range(3):
            communicator.issue(op).wait()
        dist.barrier()
        time.sleep(0.1)
        rows.append((type(op).__name__, 3 * op.bytes_sent(rank, size), device_bytes() - before))
        dist.barrier()
    communicator.close()
    return rows


def compare_with_device() -> None:
    for size in (2, 4):
        for by_rank in zip(*run_ranks(metered, size), strict=True):
            kind, on_device = by_rank[0][0], by_rank[0][2]
            by_meter = sum(sent for _, sent, _ in by_rank)
            print(f"{kind} W={size} device/meter {on_device / by_meter:.4f}")  # noqa: T201


def test_the_meter_agrees_with_the_network_device() -> None:
    """In a network namespace of its own, so that nothing else is on the device."""
    script = "import tests.ranks.engine.test_collectives as t; t.compare_with_device()"
    probe = subprocess.run(
        ["unshare", "-Urn", "ip", "link", "set", "lo", "up"], capture_output=True, text=True
    )
    if probe.returncode:
        pytest.skip(f"this machine allows no network namespaces: {probe.stderr.strip()}")
    run = subprocess.run(
        ["unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    ratios: dict[Any, float] = {
        (kind, int(size)): float(ratio)
        for kind, size, ratio in re.findall(r"(\w+) W=(\d) device/meter ([\d.]+)", run.stdout)
    }
    assert len(ratios) == 14
    for which, ratio in ratios.items():
        assert 0.99 < ratio < 1.05, f"{which}: the device carried {ratio} x what the meter says"
