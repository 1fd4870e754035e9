"""What every rank does in one cell: rounds of one step per contestant, in random order, side by side.

A step is timed from a barrier to the optimizer's end. Each contestant trains a model of its own from the same
start on the same batches; its wall time is the sum of its own steps, as if it had run alone. Who has not come
to plain DDP's loss by then goes on, until it has or has used up plain DDP's wall time.
"""

import copy
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire.bench.contestants import Contestant
from thinwire.bench.results import Track
from thinwire.bench.summary import close_to
from thinwire.bench.workloads import Workload
from thinwire.handle import Wire
from thinwire.lab.namespaces import read_devices

_EVALUATIONS = 16
_HELD_OUT_BATCHES = 4
_HELD_OUT_FROM = 1_000_000
_MOST_OVERTIME = 4
_PROBE_BYTES = 4_000_000
ON_CPU = "THINWIRE_BENCH_ON_CPU"

OnRound = Callable[[str, int], None]
"""Told of "round" or "overtime", and how many steps are done."""


@dataclass
class Entry:
    """A contestant at work on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    wire: Wire | None
    track: Track


def measure(
    workload: Workload,
    contestants: list[Contestant],
    steps: int,
    bucket_mb: float | None,
    on_round: OnRound,
    *,
    overtime: bool = True,
) -> list[Track]:
    """Every rank calls it; each gets the tracks of all ranks, joined."""
    start = _the_same_everywhere(workload.model().to(device()))
    entries = [enter(one, copy.deepcopy(start), workload, bucket_mb, steps) for one in contestants]
    running = [entry for entry in entries if entry.track.unavailable is None]
    shuffled = random.Random(0)  # the same order on every rank
    evaluate_at = {round(steps * part / _EVALUATIONS) for part in range(_EVALUATIONS + 1)}
    for step in range(steps):
        if step in evaluate_at:
            _evaluate(running, workload, step)
        for entry in shuffled.sample(running, len(running)):
            _timed_step(entry, workload, step)
        on_round("round", step + 1)
    _evaluate(running, workload, steps)
    if overtime:
        _go_on(running, workload, steps, on_round)
    for entry in running:
        _read_meter(entry)
    return [_join(entry.track) for entry in entries]


def _go_on(entries: list[Entry], workload: Workload, steps: int, on_round: OnRound) -> None:
    """Overtime, for at most four times the steps: what counts in the end is the time to a loss."""
    plain = next(entry.track for entry in entries if entry.track.kind == "ddp")
    target = close_to(plain.losses[-1][1])
    (budget,) = _agreed([sum(plain.step_seconds)])
    late = [entry for entry in entries if entry.track.kind in ("thinwire", "torch")]
    used = _agreed([sum(entry.track.step_seconds) for entry in late])
    every = max(1, steps // _EVALUATIONS)
    for done in range(steps, (1 + _MOST_OVERTIME) * steps, every):
        late = [
            entry
            for entry, seconds in zip(late, used, strict=True)
            if not entry.track.losses[-1][1] <= target and seconds < budget and math.isfinite(target)
        ]
        if not late:
            return
        on_round("overtime", done)
        for step in range(done, done + every):
            for entry in late:
                _timed_step(entry, workload, step)
        _evaluate(late, workload, done + every)
        used = _agreed([sum(entry.track.step_seconds) for entry in late])


def _agreed(values: list[float]) -> list[float]:
    """The largest of all ranks, so that all decide alike."""
    largest = torch.tensor(values, device=device(), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    agreed: list[float] = largest.tolist()
    return agreed


def _the_same_everywhere(model: nn.Module) -> nn.Module:
    """Rank 0's model on every rank, sent once: a slow link need not carry it for each contestant."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    return model


def enter(
    contestant: Contestant, model: nn.Module, workload: Workload, bucket_mb: float | None, steps: int
) -> Entry:
    """A model that all ranks have, made ready to train this way; or the reason why torch refuses its hook."""
    track = Track(contestant.name, contestant.kind, contestant.text, contestant.rival)
    if contestant.kind == "alone":
        return Entry(model, workload.optimizer(model.parameters()), None, track)
    ddp = contestant.wrap(model, bucket_mb)
    wire = None
    try:
        wire = contestant.prepare(ddp, (2 + _MOST_OVERTIME) * steps)
    except (RuntimeError, TypeError, ValueError) as error:
        if contestant.kind != "torch":
            raise
        track.unavailable = str(error).partition("\n")[0]
    return Entry(ddp, workload.optimizer(ddp.parameters()), wire, track)


def train_step(entry: Entry, workload: Workload, step: int) -> None:
    """Forward, backward, update."""
    batch = on_device(workload.batch(dist.get_rank(), step))
    entry.optimizer.zero_grad()
    entry.model(batch).backward()
    entry.optimizer.step()


def _timed_step(entry: Entry, workload: Workload, step: int) -> None:
    """The second barrier waits for the other ranks' bytes, so that none fall to the next contestant."""
    dist.barrier()
    before, started = device_bytes(), time.perf_counter()
    train_step(entry, workload, step)
    if device().type == "cuda":
        torch.cuda.synchronize()
    entry.track.step_seconds.append(time.perf_counter() - started)
    dist.barrier()
    after = device_bytes()
    if before is not None and after is not None:
        entry.track.device_bytes.append(after - before)


@torch.no_grad()
def _evaluate(entries: list[Entry], workload: Workload, step: int) -> None:
    """The mean loss of all ranks' own models on held-out batches."""
    held_out = workload.held_out or (lambda rank, number: workload.batch(rank, _HELD_OUT_FROM + number))
    batches = [on_device(held_out(dist.get_rank(), number)) for number in range(_HELD_OUT_BATCHES)]
    losses = []
    for entry in entries:
        inner = entry.model.module if isinstance(entry.model, DDP) else entry.model
        training = [module for module in inner.modules() if module.training]
        inner.eval()
        losses.append(torch.stack([inner(batch).detach().float() for batch in batches]).mean())
        for module in training:
            module.training = True
    total = torch.stack(losses)
    dist.all_reduce(total)
    for entry, loss in zip(entries, (total / dist.get_world_size()).tolist(), strict=True):
        entry.track.losses.append((step, loss))


def _read_meter(entry: Entry) -> None:
    if entry.wire is None:
        return
    records, track = entry.wire.stats().records, entry.track
    track.meter_bytes = [record.bytes_sent for record in records]
    track.encode_seconds = [r.compute_seconds for r in records if r.compute_seconds is not None]
    track.wire_seconds = [r.wire_seconds for r in records if r.wire_seconds is not None]
    track.exposed_seconds = [r.exposed_seconds for r in records if r.exposed_seconds is not None]


def _join(own: Track) -> Track:
    """One track of all ranks': a step takes as long as on its slowest rank; all else is the mean."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for name in ("device_bytes", "meter_bytes", "encode_seconds", "wire_seconds", "exposed_seconds"):
        by_step = zip(*(getattr(one, name) for one in everyone), strict=False)  # a rank may not know
        setattr(own, name, [mean(values) for values in by_step])
    own.step_seconds = [max(values) for values in zip(*(one.step_seconds for one in everyone), strict=True)]
    return own


def device() -> torch.device:
    """Where this rank trains; in the lab, whose hosts would share one GPU, on the CPU."""
    if torch.cuda.is_available() and ON_CPU not in os.environ:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def on_device(batch: Any) -> Any:
    """A batch where the model is: a tensor, or tuples, lists and dicts of them."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device())
    if isinstance(batch, tuple | list):
        parts = [on_device(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, dict):
        return {key: on_device(part) for key, part in batch.items()}
    return batch


def device_bytes() -> float | None:
    """What this rank has sent over the network so far; ranks that share a device share its count."""
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size()
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if local == world else _default_route())
    devices = read_devices()
    named = [devices[name] for name in (interface or "").split(",") if name in devices]
    sharing = world if interface == "lo" else local
    return sum(one.sent for one in named) / sharing if named else None


def _default_route() -> str | None:
    lines = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return next((words[0] for words in lines if words[1] == "00000000"), None)


def probe_rate() -> int:
    """Bits per second of the real network, by timing an all-reduce; the same on every rank."""
    payload = torch.zeros(_PROBE_BYTES // 4, device=device())
    seconds = []
    for _ in range(4):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(payload)
        if payload.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    size = dist.get_world_size()
    best = torch.tensor(min(seconds[1:]), device=device())
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return round(8 * 2 * (size - 1) / size * _PROBE_BYTES / best.item()) if size > 1 else 0
