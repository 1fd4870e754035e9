"""Exchanges of named tensors, packed into buckets and averaged by a program on a separate engine."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.engine.engine import Engine
from thinwire.engine.ops import Await, Collectives, among
from thinwire.engine.pack import pack, real_numbers
from thinwire.errors import DivergedError
from thinwire.programs.finite import all_finite
from thinwire.programs.memory import Memory, Staged
from thinwire.programs.program import Bucket, Program, by_program, mean_of, outcome_of
from thinwire.strategies.averaging.exchange_id import ExchangeId, compare_points, gather_points

_BUCKET_BYTES = 25 << 20
"""DDP's default bucket size. Buckets are small enough to overlap, and too large for latency to dominate."""


@dataclass(frozen=True)
class Members:
    """The ranks that take part in an exchange, and this rank's place among all ranks."""

    ranks: tuple[int, ...]
    rank: int
    size: int

    def limit(self, steps: Collectives[torch.Tensor]) -> Collectives[torch.Tensor]:
        """Return a program that runs among these ranks only."""
        return among(self.ranks, steps) if len(self.ranks) < self.size else steps


def packed(
    tensors: Mapping[str, torch.Tensor],
    program: Program,
    exceptions: Mapping[str, Program],
    members: Members,
    step: int,
) -> list[tuple[Program, Bucket]]:
    """Return named tensors in buckets, each with its program.

    Args:
        tensors: The tensors by name.
        program: The program that averages them.
        exceptions: Tensors that use another program, with that program.
        members: The ranks that take part.
        step: The step that the programs see in their buckets.
    """
    work: list[tuple[Program, Bucket]] = []
    place, count = members.ranks.index(members.rank), len(members.ranks)
    for chosen, names in by_program(tensors, program, exceptions):
        for own, buffer, shapes in _buckets({name: tensors[name] for name in names}):
            work.append((chosen, Bucket(len(work), buffer, own, shapes, place, count, step)))
    return work


class ModelExchange:
    """An exchange in flight that averages named tensors among some ranks. Constructing one starts it.

    Ranks first compare their `ExchangeId`s on the wire, then send the tensors. The training thread waits
    only in `means`.

    Args:
        engine: The engine that issues the collectives.
        point: The exchange's place in the run, which must be equal on all of these ranks.
        work: Buckets with their programs, as `packed` makes them.
        complex_names: Tensors whose means are complex.
        memory: The programs' memory.
        members: The ranks that take part.
    """

    def __init__(
        self,
        engine: Engine,
        point: ExchangeId,
        work: Sequence[tuple[Program, Bucket]],
        complex_names: Collection[str],
        memory: Memory,
        members: Members,
    ) -> None:
        self._engine = engine
        self._complex = complex_names
        self._memory: Staged | None = memory.staged()
        self._ranks, first = members.ranks, work[0][1].buffer
        points = members.limit(gather_points(point, members.ranks, first.device))
        self._points = engine.submit(
            points, step=point.step, label="the comparison of steps", last=False, instead=first
        )
        self._futures = []
        for number, (program, bucket) in enumerate(work, 1):
            steps = members.limit(_after(self._points, mean_of(outcome_of(program, bucket, self._memory))))
            last = number == len(work)
            future = engine.submit(steps, step=point.step, label=bucket, last=last, instead=bucket.buffer)
            self._futures.append(future)
        self._buckets = [bucket for _, bucket in work]
        self._step = engine.latest

    def means(self) -> dict[str, torch.Tensor]:
        """Wait for the means, and return them by name in the tensors' shapes and at least float32.

        The program's memory of the exchange is committed if all means are finite.

        Raises:
            MismatchError: Ranks are at different points of the run.
        """
        self._engine.guard(self._step)
        self._engine.settle(self._step)
        compare_points(self._points.wait(), self._engine.world_ranks(self._ranks))
        means = [future.wait() for future in self._futures]
        if self._memory is not None and all(map(all_finite, means)):
            self._memory.commit()
        self._memory = None
        found: dict[str, torch.Tensor] = {}
        for bucket, mean in zip(self._buckets, means, strict=True):
            found.update(replace(bucket, buffer=mean).views())
        return {
            name: torch.view_as_complex(mean) if name in self._complex else mean
            for name, mean in found.items()
        }


def check_finite(means: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise DivergedError if a mean is not finite. All ranks have the same means, so all of them raise."""
    for name, mean in means.items():
        if not all_finite(mean):
            raise DivergedError(
                f"after step {step} the ranks' average of {name!r} is not finite: a rank's model contains inf"
                " or NaN; load the last checkpoint, and lower the learning rate or clip gradients"
            )


def _after(
    points: "torch.futures.Future[torch.Tensor]", steps: Collectives[torch.Tensor]
) -> Collectives[torch.Tensor]:
    """Run a program after the ranks have compared their points.

    In the static order the comparison ends before the first turn after this wait, so it never blocks.
    """
    yield Await(points)
    return (yield from steps)


def _buckets(
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[tuple[tuple[str, ...], torch.Tensor, tuple[torch.Size, ...]]]:
    """Yield the names, a flat copy and the shapes of the tensors in each bucket."""
    names: list[str] = []
    numbers: list[torch.Tensor] = []
    size = 0
    # Complex tensors first: viewed as pairs of real numbers, they must begin at even offsets.
    together = sorted(tensors.items(), key=lambda item: (not item[1].is_complex(), str(item[1].dtype)))
    for name, own in ((name, _numbers(tensor)) for name, tensor in together):
        full = size + own.nbytes > _BUCKET_BYTES
        if names and (full or own.dtype != numbers[0].dtype):
            yield tuple(names), pack(numbers), tuple(one.shape for one in numbers)
            names, numbers, size = [], [], 0
        names.append(name)
        numbers.append(own)
        size += own.nbytes
    yield tuple(names), pack(numbers), tuple(one.shape for one in numbers)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's real numbers in at least float32, for precise means of half-precision models."""
    real = real_numbers(tensor)
    return real.to(torch.promote_types(real.dtype, torch.float32))
