"""Two ranks train a small GPT over loopback, once per hook: bytes, step time, loss.

    make demo

Loopback is fast, so fewer bytes do not mean faster steps here; they do on a slow link.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks.ranks import run
from benchmarks.workloads import WORKLOADS

RANKS = 2
STEPS = 30
WARM_UP = 3

Prepare = Callable[[DDP], "thinwire.Wire | None"]


def torch_hook(hook: Callable[..., torch.futures.Future[torch.Tensor]]) -> Prepare:
    """Register one of torch's own hooks."""
    return lambda ddp: ddp.register_comm_hook(None, hook)


CONTESTANTS: dict[str, Prepare] = {
    "DDP, no hook": lambda ddp: None,
    "torch allreduce_hook": torch_hook(torch_hooks.allreduce_hook),
    "torch fp16_compress_hook": torch_hook(torch_hooks.fp16_compress_hook),
    "thinwire Exact()": lambda ddp: thinwire.attach(ddp, thinwire.Exact()),
    "thinwire FP16()": lambda ddp: thinwire.attach(ddp, thinwire.FP16()),
    "thinwire BF16()": lambda ddp: thinwire.attach(ddp, thinwire.BF16()),
}


@dataclass
class Row:
    """What one contestant did."""

    device_bytes: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    meter_bytes: int | None = None
    wire_seconds: float | None = None
    exposed_seconds: float | None = None
    loss: float = 0.0


def loopback_bytes() -> int:
    """Bytes that have left over the loopback device, by all ranks together."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def train(rank: int, world_size: int) -> dict[str, Row]:
    """One step of every contestant in turn, in random order, so that all see the same machine."""
    work = WORKLOADS["gpt"]
    models = {name: DDP(work.model(), bucket_cap_mb=4) for name in CONTESTANTS}
    wires = {name: prepare(models[name]) for name, prepare in CONTESTANTS.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
    rows = {name: Row() for name in CONTESTANTS}
    shuffled = random.Random(0)
    for step in range(STEPS):
        for name in shuffled.sample(list(models), len(models)):
            batch, row = work.batch(rank, step), rows[name]
            dist.barrier()
            before, started = loopback_bytes(), time.perf_counter()
            optimizers[name].zero_grad()
            loss = models[name](batch)
            loss.backward()
            optimizers[name].step()
            seconds = time.perf_counter() - started
            dist.barrier()
            row.loss = loss.item()
            if step >= WARM_UP:
                row.step_seconds.append(seconds)
                row.device_bytes.append((loopback_bytes() - before) // world_size)
        if rank == 0:
            print(f"\r  step {step + 1} of {STEPS}", end="", flush=True)
    for name, wire in wires.items():
        if wire is not None and (last := wire.stats().last) is not None:
            records = wire.stats().records[WARM_UP:]
            rows[name].meter_bytes = last.bytes_sent
            rows[name].wire_seconds = statistics.median(record.wire_seconds or 0.0 for record in records)
            rows[name].exposed_seconds = statistics.median(
                record.exposed_seconds or 0.0 for record in records
            )
    return rows


def show(rows: dict[str, Row]) -> None:
    """The table."""

    def megabytes(count: float | None) -> str:
        return "-" if count is None else f"{count / 1e6:.2f}"

    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:.0f}"

    columns = ("device MB", "meter MB", "step ms", "wire ms", "exposed ms", "loss")
    print(f"\n{'per rank and step':<26}" + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        cells = (
            megabytes(statistics.median(row.device_bytes)),
            megabytes(row.meter_bytes),
            milliseconds(statistics.median(row.step_seconds)),
            milliseconds(row.wire_seconds),
            milliseconds(row.exposed_seconds),
            f"{row.loss:.4f}",
        )
        print(f"{name:<26}" + "".join(f"{cell:>12}" for cell in cells))
    print("\ndevice: read off the loopback device. meter: what thinwire counted. '-': torch does not tell.")
    print("Loopback is fast: fewer bytes save time only where the network is slow.")


def main() -> None:
    """Run it."""
    count = sum(parameter.numel() for parameter in WORKLOADS["gpt"].model().parameters())
    print(
        f"{RANKS} ranks over loopback train a GPT of {count / 1e6:.1f} M parameters, {STEPS} steps per hook"
    )
    show(run(train, RANKS))


if __name__ == "__main__":
    main()
