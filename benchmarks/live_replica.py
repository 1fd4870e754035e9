"""One rank of a replica of a job that replicas join and leave, as a process of `benchmarks.live_job`."""

import ctypes
import hashlib
import json
import logging
import math
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft.coordination import LighthouseServer

import thinwire
from examples import tiny
from thinwire.integrations import torchft
from thinwire.strategies.averaging.quorum import LiveReplicas

_WIDTH = 8
_NEW_NETWORK = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a job.

    Attributes:
        folder: Where replicas write what they do.
        program: The configuration, as Python text.
        replicas: The number of replicas.
        minimum: Replicas that an exchange needs.
        shards: The ranks of each replica, over which FSDP2 shards its model.
        pause: Seconds added to each step.
        timeout: Seconds after which a collective fails.
        dies_in: The exchange in whose middle replica 1 dies, in its first life. -1: none.
    """

    folder: Path
    program: str = "DiLoCo(4, program=Int4())"
    replicas: int = 3
    minimum: int = 2
    shards: int = 1
    pause: float = 0.01
    timeout: float = 20.0
    dies_in: int = -1

    def lighthouse(self, bind: str = "[::]:0") -> LighthouseServer:
        """Return the job's lighthouse, which is quick to declare a replica dead."""
        # `minimum` is the managers': with it here, too few replicas would wait, and not train on.
        return LighthouseServer(bind=bind, min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=1_000)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank of one life of a replica.

    Attributes:
        replica: The replica's number.
        life: How often it was started before.
        rank: The rank in the replica.
        lighthouse: The address of the lighthouse.
        host: The address by which other replicas reach this process.
        network: The file of the network namespace to enter, or None to stay.
    """

    replica: int
    life: int
    rank: int
    lighthouse: str
    host: str = "localhost"
    network: Path | None = None


def enter(network: Path | None) -> None:
    """Enter a network namespace. No other thread may have been started."""
    if network is None:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with network.open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {network}")


def serve(plan: Plan, port: int, network: Path) -> None:
    """Run the lighthouse in a network namespace, until this process is killed."""
    enter(network)
    server = plan.lighthouse(f"[::]:{port}")
    signal.pause()
    server.shutdown()


def replica(plan: Plan, place: Place) -> None:
    """Train as one rank of a replica, from different parameters, until the job's end."""
    enter(place.network)
    torch.set_num_threads(1)
    name = f"{place.replica}-{place.life}" + (f"-rank-{place.rank}" if place.rank else "")
    logging.basicConfig(filename=plan.folder / f"{name}.log", level=logging.WARNING)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    try:
        _run(plan, place, name)
    except BaseException:
        logging.getLogger("thinwire").exception("this rank has failed")
        os._exit(1)
    os._exit(0)  # torchft's threads need not be joined


def _run(plan: Plan, place: Place, name: str) -> None:
    torch.manual_seed(100 * place.replica + place.life)  # one that received nothing would differ from all
    module = nn.Sequential(nn.Linear(tiny.WIDTH, 64), nn.Linear(64, tiny.WIDTH))
    mesh = None
    if plan.shards > 1:
        mesh = _mesh(plan, place)
        for layer in (*module, module):
            fully_shard(layer, mesh=mesh)
    manager = torchft.make_manager(
        min_replicas=plan.minimum,
        lighthouse=place.lighthouse,
        shards=mesh,
        name=f"replica-{place.replica}",
        host=place.host,
        timeout=plan.timeout,
        quorum_timeout=120.0,
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.005)
    program = eval(plan.program, {"torch": torch}, vars(thinwire))
    wire = torchft.attach(manager, module, program, optimizer=optimizer)
    if plan.dies_in >= 0 and (place.replica, place.life, place.rank) == (1, 0, 0):
        patch.object(LiveReplicas, "_average", _dying(LiveReplicas._average, plan.dies_in)).start()
    wire.join()
    _train(plan, place, wire, (module, optimizer), plan.folder / f"{name}.jsonl")
    wire.finalize()
    found = {"step": wire.step, "digest": _digest(module), "rank": place.rank}
    suffix = f"-{place.rank}" if place.rank else ""
    _write(plan.folder / f"result-{place.replica}{suffix}.json", found)


def _mesh(plan: Plan, place: Place) -> Any:
    """Return the mesh of this replica's ranks, on a separate process group."""
    store = plan.folder / f"store-{place.replica}-{place.life}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=place.rank,
        world_size=plan.shards,
        timeout=timedelta(seconds=60),
    )
    return init_device_mesh("cpu", (plan.shards,), mesh_dim_names=("shard",))


def _train(plan: Plan, place: Place, wire: Any, trained: tuple[Any, Any], progress: Path) -> None:
    (module, optimizer), rows, end = trained, tiny.Rows().rows, plan.folder / "end"
    ranks, seen = plan.replicas * plan.shards, -1
    number = place.replica * plan.shards + place.rank
    with progress.open("a") as file:
        while wire.step < (int(end.read_text()) if end.exists() else math.inf):
            if wire.exchanges != seen:
                seen = wire.exchanges
                anchors = wire._runner.strategy.membership.state.fingerprint()
                row = {"exchanges": seen, "step": wire.step, "anchors": anchors, "replicas": wire.replicas}
                file.write(json.dumps(row) + "\n")
                file.flush()
            start = _WIDTH * (wire.step * ranks + number) % (len(rows) - _WIDTH)
            batch = rows[start : start + _WIDTH]
            optimizer.zero_grad()
            tiny.loss_of(module(batch), batch).backward()
            optimizer.step()
            time.sleep(plan.pause)


def _digest(module: nn.Module) -> str:
    """Return a hash of the whole parameters' bits. Collective among the ranks of a replica."""
    whole = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for parameter in module.parameters()
    ]
    bits = torch.cat([tensor.detach().flatten() for tensor in whole]).view(torch.uint8)
    return hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]


def _dying(average: Any, number: int) -> Any:
    """Return a method that kills the process where others already send it their numbers."""

    def dying(self: Any, *args: Any) -> None:
        if self._replica.exchanges == number:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        average(self, *args)

    return dying


def _write(path: Path, row: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(row))
    part.rename(path)
