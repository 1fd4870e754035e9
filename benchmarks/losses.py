"""Loss after equal steps under programs, on simulated ranks in one process, without a network.

    .venv/bin/python -m benchmarks.losses --programs "Int4,Int2,Sign" --seeds 3
    .venv/bin/python -m benchmarks.losses --programs "TopK(0.015625)" --ranks 4 --workload gpt-6m

Every contestant trains the same model from the same weights on the same batches. One model serves all ranks,
because the program returns the same mean on all of them. Matrices are averaged by the program and vectors
exactly, as `attach` does. The loss is that on held-out batches. Bytes are those that rank 0 sends for the
matrices in the last step.
"""

import argparse
import statistics
import sys
from typing import NamedTuple

import torch

from thinwire import Bucket, Collectives, Exact, Memory, Outcome, Program
from thinwire.engine.ops import Collective
from thinwire.testing import SimulatedRanks
from thinwire.tools.bench.parsing import parse_program, split_programs
from thinwire.tools.bench.workloads import Workload, find_workload

HELD_OUT = 16


class Trained(NamedTuple):
    """The results of a contestant."""

    losses: list[float]
    """Held-out losses at the points that were asked for."""
    bytes_sent: int


class Counted:
    """A program, with a count of the bytes that rank 0 sends."""

    def __init__(self, program: Program) -> None:
        self.program, self.bytes_sent = program, 0

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run the program, and count the bytes of its collectives."""
        steps, received = self.program(bucket, memory), None
        while True:
            try:
                op = steps.send(received)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            if bucket.rank == 0 and isinstance(op, Collective):
                self.bytes_sent += op.bytes_sent(*op.place(0, bucket.world_size))
            received = yield op


def train(program: Program, workload: Workload, ranks: int, points: list[int]) -> Trained:
    """Train with a program to the last of some counts of steps, and evaluate at each."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    named = dict(model.named_parameters())
    matrices = {name: tensor for name, tensor in named.items() if tensor.dim() > 1}
    counted = Counted(program)
    simulated = SimulatedRanks(counted, {name: tensor.shape for name, tensor in matrices.items()}, ranks)
    losses = []
    for step in range(1, max(points) + 1):
        gradients = [_gradients(model, workload.batch(rank, step)) for rank in range(ranks)]
        counted.bytes_sent = 0
        flat = [torch.cat([own[name].flatten() for name in matrices]) for own in gradients]
        mean = simulated.step(flat)[0].mean
        for name, part in zip(
            matrices, mean.split([tensor.numel() for tensor in matrices.values()]), strict=True
        ):
            matrices[name].grad = part.view_as(matrices[name]).clone()
        for name in named.keys() - matrices.keys():
            named[name].grad = torch.stack([own[name] for own in gradients]).mean(0)
        optimizer.step()
        if step in points:
            losses.append(_held_out_loss(model, workload))
    return Trained(losses, counted.bytes_sent)


def _gradients(model: torch.nn.Module, batch: object) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(model(batch), list(named.values()))
    return dict(zip(named, found, strict=True))


@torch.no_grad()
def _held_out_loss(model: torch.nn.Module, workload: Workload) -> float:
    assert workload.held_out is not None, "a workload with held-out batches"
    return statistics.fmean(float(model(workload.held_out(0, number))) for number in range(HELD_OUT))


def compare(programs: dict[str, Program], options: argparse.Namespace) -> None:
    """Train all contestants with all seeds, and print a line for each as soon as it has finished."""
    points = sorted({int(point) for point in options.points.split(",")})
    print(f"{options.workload}, {options.ranks} ranks, {options.seeds} seeds")
    print(f"{'':44}" + "".join(f"{f'after {point}':>24}" for point in points) + f"{'bytes':>12}")
    plain: list[Trained] = []
    for name, program in {"Exact()": Exact(), **programs}.items():
        found = [
            train(program, find_workload(options.workload).with_seed(seed, 10_000), options.ranks, points)
            for seed in range(options.seeds)
        ]
        plain = plain or found
        cells = ""
        for index in range(len(points)):
            gaps = [
                own.losses[index] / base.losses[index] - 1 for own, base in zip(found, plain, strict=True)
            ]
            loss = statistics.fmean(own.losses[index] for own in found)
            spread = f" +-{statistics.stdev(gaps):.2%}" if len(gaps) > 1 else ""
            cells += f"{f'{loss:.4f} {statistics.fmean(gaps):+.2%}{spread}':>24}"
        ratio = plain[0].bytes_sent / found[0].bytes_sent
        print(f"{name:44}{cells}{f'1/{ratio:.1f}':>12}")
        sys.stdout.flush()


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--programs", default="Int8,Int4,Int2,Sign", help="programs, separated by commas")
    made.add_argument("--workload", default="gpt-1m")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--points", default="256", help="steps after which losses are shown")
    made.add_argument("--seeds", type=int, default=1)
    return made


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    options = parser().parse_args()
    programs = {text: parse_program(text) for text in split_programs(options.programs)}
    if wrong := [text for text, program in programs.items() if not callable(program)]:
        raise SystemExit(f"{wrong[0]} is not a gradient program")
    compare(programs, options)  # type: ignore[arg-type] # checked above


if __name__ == "__main__":
    main()
