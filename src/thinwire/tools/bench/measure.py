"""The measurement of one cell, as run by every rank.

Contestants are interleaved in one process: in each round every contestant takes one step, in random order.
Separate runs drift by more than the differences to measure. A step is timed from a barrier to the end of the
optimizer's step. Every contestant trains its own copy of one model on the same batches. Its wall time is the
sum of its own steps, as if it had run alone. A contestant that has not reached plain DDP's loss after all
rounds keeps training (overtime), until it has or until it has used plain DDP's wall time.

Interleaved contestants share their memory, so peak memory is measured separately, in one fork each
(`memory`). Losses do not depend on the network. They can be trained over a fast one, with overtime counted in
steps.
"""

import copy
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire import Stats, Wire
from thinwire.tools.bench.contestants import Contestant
from thinwire.tools.bench.devices import device, device_bytes, on_device, synchronize
from thinwire.tools.bench.results import Track
from thinwire.tools.bench.summary import close_to
from thinwire.tools.bench.workloads import Workload

_EVALUATIONS = 16
_HELD_OUT_BATCHES, _HELD_OUT_FROM = 4, 1_000_000
"""Batches of an evaluation, and the step from which on they are held out of training."""
MOST_OVERTIME = 4
"""The most steps of overtime, in multiples of the steps before it."""

OnRound = Callable[[str, int], None]
"""A callback that receives "round" or "overtime", and the number of finished steps."""


@dataclass
class Entry:
    """A contestant's model, optimizer and measurements on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    wire: Wire | None
    track: Track
    first_gradient: "FirstGradient | None" = None


class FirstGradient:
    """The time at which a backward pass has computed its first gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.ready: float | None = None
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        if self.ready is None:
            synchronize()
            self.ready = time.perf_counter()


def measure(
    workload: Workload,
    contestants: list[Contestant],
    steps: int,
    bucket_mb: float | None,
    on_round: OnRound,
    *,
    overtime: Literal["time", "steps"] | None = "time",
) -> list[Track]:
    """Train all contestants side by side. Every rank must call it.

    Args:
        workload: The model and its data.
        contestants: The ways to train.
        steps: The number of rounds.
        bucket_mb: DDP's bucket size. None for the best one of each contestant.
        on_round: Called after every round.
        overtime: The limit within which contestants keep training until they reach plain DDP's loss:
            `"time"` is plain DDP's wall time, `"steps"` five times its steps. None for no overtime.

    Returns:
        One track for each contestant, joined from those of all ranks.
    """
    start = _broadcast(workload.model().to(device()))
    entries = [enter(contestant, copy.deepcopy(start), workload, bucket_mb) for contestant in contestants]
    running = [entry for entry in entries if entry.track.unavailable is None]
    # A new random order in each round, the same on every rank: a contestant's step warms caches and
    # connections for the next one, and a fixed order would always favour the same contestants.
    shuffled = random.Random(0)
    evaluate_at = {round(steps * part / _EVALUATIONS) for part in range(_EVALUATIONS + 1)}
    for step in range(steps):
        if step in evaluate_at:
            _evaluate(running, workload, step)
        for entry in shuffled.sample(running, len(running)):
            _timed_step(entry, workload, step)
        on_round("round", step + 1)
    _evaluate(running, workload, steps)
    if overtime:
        _train_overtime(running, workload, steps, on_round, by_time=overtime == "time")
    return [_join(entry.track) for entry in entries]


def _train_overtime(
    entries: list[Entry], workload: Workload, steps: int, on_round: OnRound, *, by_time: bool
) -> None:
    """Train contestants until they reach plain DDP's loss, for at most four times the steps."""
    plain = next(entry.track for entry in entries if entry.track.kind == "ddp")
    target = close_to(plain.losses[-1][1])
    # Clocks differ among ranks. Ranks that stopped at different steps would wait for each other in a
    # collective.
    budget = _agreed([sum(plain.step_seconds)])[0] if by_time else math.inf
    late = [entry for entry in entries if entry.track.kind in ("thinwire", "torch")]
    used = _agreed([sum(entry.track.step_seconds) for entry in late])
    every = max(1, steps // _EVALUATIONS)
    for done in range(steps, (1 + MOST_OVERTIME) * steps, every):
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
    """Return the maximum over ranks of each value, so that all ranks take the same decision."""
    largest = torch.tensor(values, device=device(), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    agreed: list[float] = largest.tolist()
    return agreed


def _broadcast(model: nn.Module) -> nn.Module:
    """Broadcast rank 0's model once, so that a slow link does not carry it for each contestant."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    return model


def enter(contestant: Contestant, model: nn.Module, workload: Workload, bucket_mb: float | None) -> Entry:
    """Prepare a contestant for training.

    If torch rejects its own hook on this machine, the track's `unavailable` is the reason.

    Args:
        contestant: The way to train.
        model: A model that is equal on all ranks.
        workload: Makes the optimizer.
        bucket_mb: DDP's bucket size. None for the best one of the contestant.
    """
    track = Track(contestant.name, contestant.kind, contestant.text, contestant.rival)
    if contestant.kind == "alone":
        optimizer = workload.optimizer(model.parameters())
        return Entry(model, optimizer, None, track, first_gradient=FirstGradient(model))
    track.bucket_mb, track.cycle = contestant.bucket_mb(bucket_mb), contestant.cycle
    track.averages_models = contestant.averages_models
    ddp = contestant.wrap(model, bucket_mb)
    try:
        optimizer, wire = contestant.prepare(ddp, workload.optimizer)
    except (RuntimeError, TypeError, ValueError) as error:
        if contestant.kind != "torch":
            raise
        track.unavailable = str(error).partition("\n")[0]
        optimizer, wire = workload.optimizer(ddp.parameters()), None
    return Entry(ddp, optimizer, wire, track)


def train_step(entry: Entry, workload: Workload, step: int) -> float:
    """Run forward, backward and the optimizer's step on one batch. Return the time when backward ended."""
    batch = on_device(workload.batch(dist.get_rank(), step))
    entry.optimizer.zero_grad()
    entry.model(batch).backward()
    if entry.first_gradient:
        synchronize()
    ended = time.perf_counter()
    entry.optimizer.step()
    return ended


def _timed_step(entry: Entry, workload: Workload, step: int) -> None:
    """Measure time and bytes of one step.

    The second barrier waits for the other ranks, so that their bytes are not booked to the next contestant.
    """
    counted = entry.wire.stats() if entry.wire else None
    if entry.first_gradient:
        entry.first_gradient.ready = None
    # Ranks start together, so that a step does not include waiting for a slower evaluation of another rank.
    dist.barrier()
    before, used, started = device_bytes(), time.process_time(), time.perf_counter()
    backward_ended = train_step(entry, workload, step)
    synchronize()
    ended = time.perf_counter()
    entry.track.cpu_seconds.append(time.process_time() - used)
    dist.barrier()
    after = device_bytes()
    entry.track.step_seconds.append(ended - started)
    if before is not None and after is not None:
        entry.track.device_bytes.append(after - before)
    if entry.first_gradient and entry.first_gradient.ready is not None:
        entry.track.first_gradient_seconds.append(entry.first_gradient.ready - started)
        entry.track.optimizer_seconds.append(ended - backward_ended)
    if entry.wire and counted:
        _read_meter(entry.track, counted, entry.wire.stats())


def _evaluate(entries: list[Entry], workload: Workload, step: int) -> None:
    """Record the held-out loss of each contestant."""
    models = [(entry.model, entry.track.averages_models) for entry in entries]
    for entry, loss in zip(entries, held_out_losses(models, workload), strict=True):
        entry.track.losses.append((step, loss))


def _read_meter(track: Track, before: Stats, after: Stats) -> None:
    """Record the counters of one step: gradients, and models or parameters if any were sent."""
    track.meter_bytes.append(after.bytes_sent - before.bytes_sent)
    if after.last is None or after.last.encode_seconds is not None:
        track.encode_seconds.append(after.encode_seconds - before.encode_seconds)
        track.wire_seconds.append(after.wire_seconds - before.wire_seconds)
        track.exposed_seconds.append(after.exposed_seconds - before.exposed_seconds)


def _join(own: Track) -> Track:
    """Join the tracks of all ranks. Step times are those of the slowest rank, other values are means."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    means = (
        "cpu_seconds",
        "device_bytes",
        "meter_bytes",
        "encode_seconds",
        "wire_seconds",
        "exposed_seconds",
    )
    for name in means:
        by_step = zip(*(getattr(track, name) for track in gathered), strict=False)  # a rank may lack them
        setattr(own, name, [mean(values) for values in by_step])
    for name in ("step_seconds", "first_gradient_seconds", "optimizer_seconds"):
        by_step = zip(*(getattr(track, name) for track in gathered), strict=True)
        setattr(own, name, [max(values) for values in by_step])
    return own


@torch.no_grad()
def held_out_losses(models: list[tuple[nn.Module, bool]], workload: Workload) -> list[float]:
    """Return the held-out loss of each model, averaged over the batches of all ranks. Collective.

    Args:
        models: Models, each with True if ranks train it separately, so that its average is evaluated.
        workload: The data.
    """
    held_out = workload.held_out or (lambda rank, number: workload.batch(rank, _HELD_OUT_FROM + number))
    batches = [on_device(held_out(dist.get_rank(), number)) for number in range(_HELD_OUT_BATCHES)]
    losses = []
    for model, apart in models:
        inner = model.module if isinstance(model, DDP) else model
        losses.append(_loss(inner, averaged(inner) if apart else {}, batches))
    total = torch.stack(losses)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means


def _loss(model: nn.Module, tensors: dict[str, torch.Tensor], batches: list[Any]) -> torch.Tensor:
    """Return the mean loss in evaluation mode, with `tensors` in place of the model's own of these names."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        losses = [
            (functional_call(model, tensors, (batch,)) if tensors else model(batch)).detach().float()
            for batch in batches
        ]
    finally:
        for module in training:
            module.training = True
    return torch.stack(losses).mean()


@torch.no_grad()
def averaged(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the means over ranks of a model's parameters and floating-point buffers. Collective.

    The model itself stays as it is, so that training continues as if it had not been evaluated.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in floating.items():
        by_dtype.setdefault(tensor.dtype, []).append(name)
    means: dict[str, torch.Tensor] = {}
    for names in by_dtype.values():
        flat = torch.cat([floating[name].reshape(-1) for name in names])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([floating[name].numel() for name in names])
        means |= {name: part.view(floating[name].shape) for name, part in zip(names, parts, strict=True)}
    return means
