"""One exchange of named tensors, packed into buckets and averaged by a program on a separate engine."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from thinwire.engine.comm.rendezvous import ranks_text
from thinwire.engine.engine import Engine
from thinwire.engine.ops import AllGather, Await, Collectives, among
from thinwire.engine.pack import pack, real_numbers
from thinwire.errors import DivergedError, MismatchError
from thinwire.monitors.audit import Findings
from thinwire.programs.finite import all_finite
from thinwire.programs.memory import Memory, Staged
from thinwire.programs.program import Bucket, Program, by_program, mean_of

_BUCKET_BYTES = 25 << 20
"""DDP's default bucket size. Buckets are small enough to overlap, and too large for latency to dominate."""
_WHOLE, _DIVERGED = -1, -2
"""Placeholders for a fragment in headers: whole models, and whole models that this rank has changed."""


@dataclass(frozen=True)
class ExchangeId:
    """An exchange by the step that it follows and its fragment, which is None for whole models."""

    step: int
    fragment: int | None

    def __str__(self) -> str:
        if self.fragment is None:
            return f"synchronising models (finalize or swap) after step {self.step}"
        return f"averaging fragment {self.fragment} after step {self.step}"


@dataclass(frozen=True)
class Members:
    """The ranks that take part in an exchange, and this rank's place among all ranks."""

    ranks: tuple[int, ...]
    rank: int
    size: int

    def limit(self, program: Collectives[torch.Tensor]) -> Collectives[torch.Tensor]:
        """Return a program that runs among these ranks only."""
        return among(self.ranks, program) if len(self.ranks) < self.size else program


@dataclass(frozen=True)
class Contribution:
    """This rank's tensors of an exchange, and the programs that average them.

    Attributes:
        tensors: The tensors by name.
        program: The program that averages them.
        memory: The programs' memory.
        exceptions: Tensors that use another program, with that program.
        number: The step that programs see in their buckets: the number of whole-model exchanges.
        findings: The audit of this exchange, if there is one.
    """

    tensors: Mapping[str, torch.Tensor]
    program: Program
    memory: Memory
    exceptions: Mapping[str, Program] = field(default_factory=dict)
    number: int = 0
    findings: Findings | None = None


def packed(
    tensors: Mapping[str, torch.Tensor],
    program: Program,
    exceptions: Mapping[str, Program],
    members: Members,
    number: int,
) -> list[tuple[Program, Bucket]]:
    """Return named tensors in buckets, each with its program.

    Args:
        tensors: The tensors by name.
        program: The program that averages them.
        exceptions: Tensors that use another program, with that program.
        members: The ranks that take part.
        number: The step that the programs see in their buckets.
    """
    work: list[tuple[Program, Bucket]] = []
    place, count = members.ranks.index(members.rank), len(members.ranks)
    for chosen, names in by_program(tensors, program, exceptions):
        for own, buffer, shapes in _buckets({name: tensors[name] for name in names}):
            work.append((chosen, Bucket(len(work), buffer, own, shapes, place, count, number)))
    return work


class ModelExchange:
    """An exchange in flight that averages named tensors among some ranks. Constructing one starts it.

    Ranks first compare their `ExchangeId`s on the wire, 8 bytes each, then send the tensors. The training
    thread waits only in `means`, which may be several steps later.

    Args:
        engine: The engine that issues the collectives.
        point: The exchange's place in the run, which must be equal on all of these ranks.
        contribution: This rank's tensors and programs.
        members: The ranks that take part.
    """

    def __init__(
        self, engine: Engine, point: ExchangeId, contribution: Contribution, members: Members
    ) -> None:
        own = contribution
        work = packed(own.tensors, own.program, own.exceptions, members, own.number)
        self._engine, self._ranks = engine, members.ranks
        self._complex = {name for name, tensor in own.tensors.items() if tensor.is_complex()}
        self._memory: Staged | None = own.memory.staged()
        first = work[0][1].buffer
        # Pseudo-gradients and parameters have the same shapes. Ranks that took different numbers of steps
        # would silently mix one's pseudo-gradients with another's parameters, and no backend could detect
        # it. Comparing through the store would make the training thread wait for the slowest rank. As a
        # program of the exchange, the comparison overlaps with training.
        points = members.limit(gather_points(point, members.ranks, first.device))
        self._points = engine.submit(
            points, step=point.step, label="the comparison of steps", last=False, instead=first
        )
        self._futures = []
        for number, (program, bucket) in enumerate(work, 1):
            averaging = _mean(self._points, program, bucket, self._memory)
            future = engine.submit(
                members.limit(averaging),
                step=point.step,
                label=bucket,
                last=number == len(work),
                instead=bucket.buffer,
            )
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
    """Raise DivergedError if a mean is not finite. All ranks have the same means, so all of them raise.

    There is no step to skip: one rank's model is lost, and averaging would lose the others too.
    """
    for name, mean in means.items():
        if not all_finite(mean):
            raise DivergedError(
                f"after step {step} the ranks' average of {name!r} is not finite: a rank's model contains inf"
                " or NaN; load the last checkpoint, and lower the learning rate or clip gradients"
            )


def gather_points(own: ExchangeId, ranks: tuple[int, ...], device: torch.device) -> Collectives[torch.Tensor]:
    """Gather the points of these ranks, 8 bytes each, and compare them on CPU.

    On an accelerator the comparison would block the host until the slowest rank arrives. There the caller
    compares the result later, when it uses the means.

    Raises:
        MismatchError: Ranks are at different points.
    """
    fragment = _WHOLE if own.fragment is None else own.fragment
    header = torch.tensor([own.step, fragment], dtype=torch.int32, device=device)
    gathered: torch.Tensor = yield AllGather(header)
    if device.type == "cpu":
        compare_points(gathered, ranks)
    return gathered


def gather_diverged(step: int, diverged: bool, device: torch.device) -> Collectives[torch.Tensor]:
    """Gather whether ranks have changed their models since the last average, in the form of points.

    Every rank must take part. Ranks with different numbers of steps are then detected, and all ranks make the
    same decision whether to synchronise models.
    """
    kind = _DIVERGED if diverged else _WHOLE
    gathered: torch.Tensor = yield AllGather(torch.tensor([step, kind], dtype=torch.int32, device=device))
    return gathered


def any_diverged(gathered: torch.Tensor) -> bool:
    """Return whether any rank has changed its model, from the result of `gather_diverged`."""
    return bool((gathered[:, 1] == _DIVERGED).any())


def compare_points(gathered: torch.Tensor, ranks: tuple[int, ...]) -> None:
    """Raise the same MismatchError on all of these ranks if their points differ."""
    points: dict[ExchangeId, list[int]] = defaultdict(list)
    for rank, (step, fragment) in zip(ranks, gathered.tolist(), strict=True):
        points[ExchangeId(step, None if fragment < 0 else fragment)].append(rank)
    if len(points) > 1:
        sides = "; ".join(f"{ranks_text(members)} {point}" for point, members in points.items())
        raise MismatchError(
            f"ranks are at different exchanges of models: {sides}. Every rank must take the same number"
            " of steps: give all ranks the same number of batches (DistributedSampler, drop_last), and resume"
            " from the last checkpoint"
        )


def _mean(
    points: "torch.futures.Future[torch.Tensor]", program: Program, bucket: Bucket, memory: Memory
) -> Collectives[torch.Tensor]:
    """Average a bucket after the ranks have compared their points."""
    # In the static order the comparison ends before the first turn after this wait, so it never blocks.
    yield Await(points)
    return (yield from mean_of(program, bucket, memory))


def _buckets(
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[tuple[tuple[str, ...], torch.Tensor, tuple[torch.Size, ...]]]:
    """Yield the names, a flat copy and the shapes of the tensors in each bucket."""
    names: list[str] = []
    numbers: list[torch.Tensor] = []
    size = 0
    # Complex tensors first: viewed as pairs of real numbers, they must begin at even offsets.
    together = sorted(tensors.items(), key=lambda item: (not item[1].is_complex(), str(item[1].dtype)))
    for name, tensor in together:
        # At least float32, for precise means of half-precision models.
        real = real_numbers(tensor)
        own = real.to(torch.promote_types(real.dtype, torch.float32))
        full = size + own.nbytes > _BUCKET_BYTES
        if names and (full or own.dtype != numbers[0].dtype):
            yield tuple(names), pack(numbers), tuple(packed.shape for packed in numbers)
            names, numbers, size = [], [], 0
        names.append(name)
        numbers.append(own)
        size += own.nbytes
    yield tuple(names), pack(numbers), tuple(packed.shape for packed in numbers)
