"""Held-out loss by steps and bytes of any program, on simulated ranks in one process, compared with DDP's.

    .venv/bin/python benchmarks/time_to_loss.py "PowerSGD(rank=4)" Int4 --steps 256 --seeds 3
    .venv/bin/python benchmarks/time_to_loss.py "DiLoCo(period=16, program=Int4())" --steps 1024
    .venv/bin/python benchmarks/time_to_loss.py "SparseLoCo(period=16)" --steps 4096 --link 10mbit

Every contestant trains the same model from the same weights on the same batches, with the workload's own
optimizer. Losses depend on the programs alone, so no network is needed. Bytes are those that rank 0 would
send, without the few that compare steps. The loss of models that ranks train apart is that of their average.

With `--link`, minutes are estimated: each step computes for `--computing` seconds, then its bytes pass the
link without overlap. With `--out`, runs are kept in a file and not repeated.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import thinwire
from benchmarks.losses import Counted
from thinwire.engine.simulate import simulate
from thinwire.programs.memory import Memory
from thinwire.programs.program import Program, mean_of
from thinwire.programs.rules import exceptions_of
from thinwire.strategies.averaging.anchors import Anchors, split_evenly
from thinwire.strategies.averaging.diloco import outer_step, pseudo_gradients
from thinwire.strategies.averaging.exchange import Members, packed
from thinwire.strategies.averaging.policy import Averaging
from thinwire.tools.bench.parsing import parse_program
from thinwire.tools.bench.workloads import Workload, find_workload
from thinwire.tools.lab.network import parse_rate

Tensors = Mapping[str, torch.Tensor]
HELD_OUT = 32
"""Held-out batches, of which each rank of `thinwire bench` evaluates four."""
PLAIN = "Exact"
FIRST = 64
"""The step of the first point. Later points are at its doubles."""


@dataclass(frozen=True)
class Point:
    """A moment of a run: finished steps, bytes that rank 0 has sent, and the held-out loss."""

    step: int
    sent: int
    loss: float


class Exchanges:
    """Means of named tensors over simulated ranks, with a memory for each rank and a count of bytes."""

    def __init__(self, shapes: Mapping[str, torch.Size], world: int) -> None:
        self.shapes = shapes
        self.world = world
        self.sent = 0
        self._memories = [Memory() for _ in range(world)]

    def mean(self, ranks: Sequence[Tensors], program: Program, step: int) -> dict[str, torch.Tensor]:
        """Return the mean of the ranks' tensors by name, as rank 0 receives it."""
        exceptions = exceptions_of([], program, self.shapes)
        staged = [memory.staged() for memory in self._memories]
        everyone = tuple(range(self.world))
        jobs = [
            packed(own, program, exceptions, Members(everyone, rank, self.world), step)
            for rank, own in enumerate(ranks)
        ]
        counts = [[Counted(chosen) for chosen, _ in job] for job in jobs]
        running = [
            [mean_of(program(bucket, memory)) for program, (_, bucket) in zip(own, job, strict=True)]
            for own, job, memory in zip(counts, jobs, staged, strict=True)
        ]
        with torch.no_grad():
            results = simulate(running).results[0]
        for memory in staged:
            memory.commit()
        self.sent += sum(count.bytes_sent for count in counts[0])
        found: dict[str, torch.Tensor] = {}
        for (_, bucket), mean in zip(jobs[0], results, strict=True):
            found |= replace(bucket, buffer=mean).views()
        return found


class Training:
    """Ranks that train copies of one model, and average gradients or models as configured."""

    def __init__(self, workload: Workload, contestant: Any, world: int) -> None:
        model = workload.model()
        self._workload = workload
        self._averaging = contestant if isinstance(contestant, Averaging) else None
        self._gradients: Program = contestant if self._averaging is None else self._averaging.gradients
        # Ranks whose gradients are averaged hold equal models, so that one model stands for all.
        self.models = [deepcopy(model) for _ in range(1 if self._averaging is None else world)]
        self._optimizers = [workload.optimizer(model.parameters()) for model in self.models]
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.exchanges = [Exchanges(shapes, world) for _ in ("gradients", "models")]
        self._world = world
        self._anchors: Anchors | None = None
        self._used = 0
        self._step = 0

    @property
    def sent(self) -> int:
        """Bytes that rank 0 has sent."""
        return sum(exchange.sent for exchange in self.exchanges)

    def step(self) -> None:
        """Train one step on every rank, and average."""
        self._step += 1
        since = 0 if self._averaging is None else self._step - self._averaging.warmup_steps
        loop = None if self._averaging is None else self._averaging.outer_loop
        if loop is not None and since == 1:
            held = dict(self.models[0].named_parameters())
            fragments = split_evenly({name: tensor.numel() for name, tensor in held.items()}, 1)
            self._anchors = Anchors(held, fragments, loop.optimizer)
        own = [self._backward(rank) for rank in range(self._world)]
        if since <= 0:
            mean = self.exchanges[0].mean(own, self._gradients, self._step - 1)
            own = [mean for _ in self.models]
        for model, optimizer, gradients in zip(self.models, self._optimizers, own, strict=True):
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
        if self._averaging is not None and since > 0 and self._averaging.due(since):
            self._average()

    def loss(self) -> float:
        """Return the held-out loss of the average of all ranks' models."""
        model = deepcopy(self.models[0])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(
                    torch.stack([dict(model.named_parameters())[name] for model in self.models]).mean(0)
                )
            assert self._workload.held_out is not None
            losses = [model(self._workload.held_out(0, number)) for number in range(HELD_OUT)]
        return float(torch.stack(losses).mean())

    def _backward(self, rank: int) -> dict[str, torch.Tensor]:
        model = self.models[min(rank, len(self.models) - 1)]
        model.zero_grad()
        model(self._workload.batch(rank, self._step)).backward()
        return {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    def _average(self) -> None:
        """Set all models to their mean, or to anchors that an outer optimizer steps by the mean change."""
        held = [
            {name: parameter.detach() for name, parameter in model.named_parameters()}
            for model in self.models
        ]
        loop = None if self._averaging is None else self._averaging.outer_loop
        if self._anchors is None or loop is None:
            result = self.exchanges[1].mean(held, thinwire.Exact(), self._used)
        else:
            changes = [pseudo_gradients(self._anchors, own, 0) for own in held]
            mean = self.exchanges[1].mean(changes, loop.program, self._used)
            outer_step(self._anchors, held[0], 0, mean, loop, self._world)
            result = {name: self._anchors[name] for name in held[0]}
        self._used += 1
        for own in held:
            for name, parameter in own.items():
                parameter.copy_(result[name])


def train(workload: Workload, contestant: Any, world: int, steps: int) -> Iterator[Point]:
    """Train a contestant. Yield points at 64, 128, 256 steps and so on, and at the end."""
    training = Training(workload, contestant, world)
    for step in range(1, steps + 1):
        training.step()
        if step == steps or (step >= FIRST and step & (step - 1) == 0):
            yield Point(step, training.sent, training.loss())


class Runs:
    """Finished runs by workload, contestant, ranks, steps and seed, kept in a file if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        kept = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._points: dict[str, list[list[float]]] = kept

    def points(self, text: str, options: argparse.Namespace, seed: int) -> list[Point]:
        """Return the points of a run, which is made unless it is kept."""
        key = f"{options.workload} lr={options.lr} x{options.ranks} {text} {options.steps} seed {seed}"
        if key not in self._points:
            workload = find_workload(options.workload).with_seed(seed, options.steps)
            if options.lr:
                workload = replace(
                    workload, optimizer=lambda held: torch.optim.AdamW(held, lr=float(options.lr))
                )
            run = train(workload, parse_program(text), options.ranks, options.steps)
            self._points[key] = [list(astuple(point)) for point in run]
            if self._path is not None:
                self._path.write_text(json.dumps(self._points, indent=1))
        return [Point(int(step), int(sent), loss) for step, sent, loss in self._points[key]]


def show(text: str, runs: list[list[Point]], plain: list[list[Point]], options: argparse.Namespace) -> None:
    """Print a contestant's losses and their gaps to plain DDP's after equal steps, means over seeds."""
    sent, base = runs[0][-1].sent, plain[0][-1].sent
    fewer = f", 1/{base / sent:.0f}" if sent else ""
    print(f"\n{text}: {sent / 1e6:.2f} MB{fewer}", end="")
    rate = parse_rate(options.link) if options.link else None
    if rate is not None:
        seconds = options.steps * options.computing + 8 * sent / rate
        print(f", {seconds / 60:.1f} min at {options.link}", end="")
    steps = [point.step for point in runs[0]]
    losses = [[run[place].loss for run in runs] for place in range(len(steps))]
    bases = [[run[place].loss for run in plain] for place in range(len(steps))]
    gaps = [
        [own / other - 1 for own, other in zip(*pair, strict=True)]
        for pair in zip(losses, bases, strict=True)
    ]
    print("\n  steps  " + "".join(f"{step:>9}" for step in steps))
    print("  loss   " + "".join(f"{statistics.mean(own):>9.4f}" for own in losses))
    print("  gap    " + "".join(f"{statistics.mean(own):>+9.2%}" for own in gaps))
    if len(runs) > 1:
        print("  +-     " + "".join(f"{statistics.stdev(own):>9.2%}" for own in gaps), flush=True)


def main() -> None:
    """Train plain DDP and each contestant, and print their points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("contestants", nargs="+", help="programs or strategies, as for thinwire bench")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workload", default="gpt-1m")
    parser.add_argument("--lr", help="AdamW's learning rate; the workload's own by default")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--link", help="rate of the link for the estimated minutes, such as 10mbit")
    parser.add_argument("--computing", type=float, default=0.1, help="seconds that a step computes")
    parser.add_argument("--out", type=Path, help="file that keeps finished runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(options.out)
    plain = [runs.points(PLAIN, options, seed) for seed in range(options.seeds)]
    show("DDP", plain, plain, options)
    for text in options.contestants:
        show(text, [runs.points(text, options, seed) for seed in range(options.seeds)], plain, options)


if __name__ == "__main__":
    main()
