"""One exchange of named tensors: packed into buckets, averaged by a program, on an engine of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from thinwire.programs.memory import Memory, Staged
from thinwire.programs.overflow import all_finite
from thinwire.programs.program import Bucket, Program, by_program, mean_of, outcome_of
from thinwire.wire.engine import Engine
from thinwire.wire.ops import among
from thinwire.wire.pack import pack, real_numbers

_BUCKET_BYTES = 25 << 20
"""As DDP's: small enough that buckets overlap, large enough that latency does not count."""


class Exchange:
    """Named tensors on their way to their mean among some ranks; start it, go on, and ask for the means."""

    def __init__(
        self,
        engine: Engine,
        tensors: Mapping[str, torch.Tensor],
        program: Program,
        memory: Memory,
        ranks: tuple[int, ...],
        place: tuple[int, int],
        step: int,
        exceptions: Mapping[str, Program],
    ) -> None:
        self._engine = engine
        self._complex = {name for name, tensor in tensors.items() if tensor.is_complex()}
        self._memory: Staged | None = memory.staged()
        rank, size = place
        full: list[tuple[Program, Bucket]] = []
        for chosen, members in by_program(tensors, program, exceptions):
            for names, buffer, shapes in _buckets({name: tensors[name] for name in members}):
                bucket = Bucket(len(full), buffer, names, shapes, ranks.index(rank), len(ranks), step)
                full.append((chosen, bucket))
        self._futures = []
        for number, (chosen, bucket) in enumerate(full, 1):
            steps = mean_of(outcome_of(chosen, bucket, self._memory))
            if len(ranks) < size:
                steps = among(ranks, steps)
            last = number == len(full)
            self._futures.append(engine.submit(steps, label=bucket, last=last, instead=bucket.buffer))
        self._buckets = [bucket for _, bucket in full]
        self._step = engine.latest

    def means(self) -> dict[str, torch.Tensor]:
        """Wait for the means, by name: float32 at least, shaped as the tensors were.

        What the program remembers of the exchange holds from then on, if all means are finite.
        """
        self._engine.guard(self._step)
        self._engine.settle(self._step)
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


def _buckets(
    tensors: Mapping[str, torch.Tensor],
) -> Iterator[tuple[tuple[str, ...], torch.Tensor, tuple[torch.Size, ...]]]:
    """Names, one flat copy of their tensors' numbers, and the shapes of those."""
    names: list[str] = []
    numbers: list[torch.Tensor] = []
    # Complex ones first: as pairs they must begin at even places.
    together = sorted(tensors.items(), key=lambda item: (not item[1].is_complex(), str(item[1].dtype)))
    for name, own in ((name, _numbers(tensor)) for name, tensor in together):
        full = sum(one.nbytes for one in numbers) + own.nbytes > _BUCKET_BYTES
        if names and (full or own.dtype != numbers[0].dtype):
            yield tuple(names), pack(numbers), tuple(one.shape for one in numbers)
            names, numbers = [], []
        names.append(name)
        numbers.append(own)
    yield tuple(names), pack(numbers), tuple(one.shape for one in numbers)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Real numbers of at least float32, in whose precision means of half-precision models are taken."""
    real = real_numbers(tensor)
    return real.to(torch.promote_types(real.dtype, torch.float32))
