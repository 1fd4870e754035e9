"""A step's buckets, divided for programs and put together again.

    groups    parameters that are exchanged together: the model's buckets, or those of the resumed run
    parts     a group's parameters by program, in slices of the size that each program prefers
    pieces    parts as buckets: views of the model's own memory, or copies that are written back

Some results depend on neighbours in a bucket, such as blocks of numbers that share a scale, or the order in
which ranks are summed. After a resume DDP's first buckets are not its final ones, and may have another size.
Keeping the saved groups makes these results equal to those of an uninterrupted run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from thinwire.engine.futures import Result
from thinwire.engine.pack import pack, real_numbers, unpack
from thinwire.engine.streams import Writers
from thinwire.programs.allreduce import Alone
from thinwire.programs.program import Bucket, Program, Programs, by_program

NameGroups = tuple[tuple[str, ...], ...]
"""Parameters' names, group by group, in the order in which gradients are exchanged."""

_SMALL = 1 << 18
"""The largest exact parameter, in bytes, that waits for the last bucket to share a collective.

Larger ones would be sent when backward is over, without overlap.
"""


class BucketPart(NamedTuple):
    """Parameters of a bucket that one program averages together."""

    program: Program
    names: tuple[str, ...]
    exact: frozenset[str] = frozenset()
    """The names whose mean must be exact, although the program compresses the others."""
    deferred: bool = False
    """Whether the part waits for the parts of all other buckets of the step."""
    left_out: frozenset[str] = frozenset()
    """The names among others that wait for the end of the step, so that the others are consecutive."""

    @property
    def averaged(self) -> tuple[str, ...]:
        """The names whose means this part computes."""
        return (
            tuple(name for name in self.names if name not in self.left_out) if self.left_out else self.names
        )

    def sliced(self, nbytes: Mapping[str, int]) -> "list[BucketPart]":
        """Divide the part, between parameters, into slices of about the size that its program prefers.

        While one slice is on the wire, the next is encoded. Slices follow from the parameters' sizes alone,
        so they are the same on all ranks, and in a resumed run.
        """
        # A single parameter is not divided: native code encodes 1 MB in less than a millisecond, and a link
        # of 1 Gbit/s takes 8 to send an eighth of it, so there is little to gain.
        wanted, total = self.program.preferred_bytes, sum(nbytes[name] for name in self.names)
        count = 1 if wanted is None else max(1, round(total / wanted))
        if count == 1:
            return [self]
        members: dict[int, list[str]] = {}
        start = 0
        for name in self.names:
            members.setdefault(start * count // total, []).append(name)
            start += nbytes[name]
        return [
            self._replace(
                names=tuple(own),
                exact=self.exact.intersection(own),
                left_out=self.left_out.intersection(own),
            )
            for own in members.values()
        ]


def parts_of(names: tuple[str, ...], nbytes: Mapping[str, int], programs: Programs) -> list[BucketPart]:
    """Divide a group of parameters by program.

    The first program of the group that can carry exact parameters averages those that are exact although
    their program is lossy. If no program can, small ones wait for the end of the step, when one all-reduce
    averages those of all buckets.

    Args:
        names: Names of the parameters.
        nbytes: The size of each parameter's gradient.
        programs: The programs of the step.

    Returns:
        The parts, in the order in which they are exchanged.
    """
    chosen = by_program(names, programs.program, programs.exceptions)
    exact = frozenset(name for name in names if name in programs.exact)
    if not exact:
        return [BucketPart(program, own) for program, own in chosen]
    others = (name for name in names if name not in exact)
    lossy = by_program(others, programs.program, programs.exceptions)
    candidates = [program for program, _ in lossy] or [programs.program]
    # Vectors are exact by default: 1 % of the numbers, and the most sensitive. TwoShot sends them in its
    # rows.
    carrier = next((program for program in candidates if program.carries_exact), None)
    if carrier is None:
        # A collective of its own for each bucket's biases would cost a round trip each.
        deferred = frozenset(name for name in exact if nbytes[name] <= _SMALL)
        parts = []
        for program, own in chosen:
            if kept := tuple(name for name in own if name not in deferred):
                parts.append(_spanning(program, kept, names, deferred))
            if waiting := tuple(name for name in own if name in deferred):
                parts.append(BucketPart(program, waiting, deferred=True))
        return parts
    members = {id(program): frozenset(own) for program, own in lossy}
    taken = members.get(id(carrier), frozenset()) | exact
    whole = BucketPart(carrier, tuple(name for name in names if name in taken), exact)
    return [whole, *(BucketPart(program, own) for program, own in lossy if program is not carrier)]


def _spanning(
    program: Program, kept: tuple[str, ...], names: tuple[str, ...], deferred: frozenset[str]
) -> BucketPart:
    """Return the part of `kept`, with the deferred names between them if the program can leave these out.

    The part is then consecutive in the bucket, whose memory it uses. Otherwise the gradients would be copied
    to another buffer, and their means back.
    """
    span = names[names.index(kept[0]) : names.index(kept[-1]) + 1]
    between = frozenset(span) - frozenset(kept)
    if program.leaves_out and between and between <= deferred:
        return BucketPart(program, span, left_out=between)
    return BucketPart(program, kept)


class BucketLayout:
    """The groups in which parameters are exchanged: the model's buckets, unless others are held."""

    def __init__(self) -> None:
        self.held: NameGroups | None = None
        """The groups of a loaded state."""
        self.upcoming: NameGroups | None = None
        """The groups of the next step, as far as they are known."""
        self.again: NameGroups | None = None
        """The groups of a step that was rolled back, for the step that replaces it."""
        self.latest: list[tuple[str, ...]] = []
        """The groups of this step so far."""
        self._arrived: dict[str, None] = {}
        self._final: NameGroups | None = None
        """DDP's final buckets, once they are known."""

    @property
    def follows_model(self) -> bool:
        """True if each of the model's buckets is a group."""
        return self.held is None and self.again is None

    def complete(self, names: tuple[str, ...], last: bool) -> list[tuple[str, ...]]:
        """Add a bucket, and return the groups that it completes.

        Args:
            names: The bucket's parameters.
            last: Whether it is the step's last bucket.

        Returns:
            The groups whose gradients are all available now, in order.
        """
        wanted = self.again or self.held
        if wanted is None:
            groups = [names]
        else:
            self._arrived.update(dict.fromkeys(names))
            groups = []
            for group in wanted[len(self.latest) :]:
                available = tuple(name for name in group if name in self._arrived)
                if len(available) < len(group) and not last:
                    break
                groups.append(available)
            if last:  # parameters that are in no group
                known = {name for group in wanted for name in group}
                groups.append(tuple(name for name in self._arrived if name not in known))
        self.latest += groups
        return [group for group in groups if group]

    def end(self) -> None:
        """End the step, after its last bucket."""
        latest = tuple(group for group in self.latest if group)
        # A step that replaces a rolled back one keeps its groups. The next one has DDP's final buckets.
        self.upcoming = latest if self._final is None or self.held is not None else self._final
        self.latest, self._arrived, self.again = [], {}, None

    def repeat(self) -> None:
        """Use the latest step's groups again, because the step was rolled back and the next replaces it."""
        self.again = self.upcoming

    def foresee(self, final: NameGroups) -> None:
        """Record DDP's final buckets before the step that first uses them, for a state saved in between."""
        self.upcoming = self._final = final


class Piece(NamedTuple):
    """A bucket for one program, and whether it shares the memory of the model's bucket."""

    program: Program
    bucket: Bucket
    in_place: bool


class Buckets:
    """The division of a step's buckets into pieces, if parameters use different programs."""

    def __init__(self) -> None:
        self.layout = BucketLayout()
        self._pending: dict[str, PendingBucket] = {}
        self._deferred: list[BucketPart] = []
        """Parts of this step's buckets that wait for the last bucket."""
        self._nbytes: dict[str, int] = {}
        self._parts: dict[tuple[str, ...], list[BucketPart]] = {}
        self._parts_for: Programs | None = None

    def begin(self) -> None:
        """Begin a step, without buckets left from one that was interrupted."""
        self._pending, self._deferred = {}, []

    def end(self) -> None:
        """End the step, after its last bucket."""
        self.begin()
        self.layout.end()

    def whole(
        self,
        names: tuple[str, ...],
        shapes: Sequence[torch.Size],
        itemsize: int,
        programs: Programs,
        last: bool,
        strided_as: Sequence[torch.Tensor],
    ) -> BucketPart | None:
        """Return the part that is a whole bucket, or None if the bucket must be divided or copied.

        Most buckets are whole, and their parts are known after the first step.

        Args:
            names: The bucket's parameters.
            shapes: Their shapes.
            itemsize: The bytes of a number.
            programs: The programs of the step.
            last: Whether it is the step's last bucket.
            strided_as: The tensors whose strides the bucket's gradients have. Empty: all are contiguous.
        """
        # Parts that waited for the last bucket are exchanged with it, as pieces.
        if not self.layout.follows_model or (last and self._deferred):
            return None
        if programs.exceptions or programs.sliced:
            if self._parts_for is not programs or names not in self._parts:
                self._measure(names, shapes, itemsize)
            parts = self._divided(names, programs)
            if len(parts) != 1 or parts[0].deferred:
                return None
            part = parts[0]
        else:
            part = BucketPart(programs.program, names)
        if not part.program.ignores_order and not all(tensor.is_contiguous() for tensor in strided_as):
            return None
        self.layout.latest.append(names)
        return part

    def divide(
        self, bucket: Bucket, programs: Programs, last: bool, strided_as: Sequence[torch.Tensor]
    ) -> "tuple[list[Piece], PendingBucket]":
        """Return the pieces whose gradients are complete with this bucket, and the bucket that awaits means.

        A piece works on the bucket's own memory if possible. It is a copy if its parameters are not
        consecutive there, or not contiguous (channels_last). Programs get gradients, and keep residuals, in
        the order of the parameter's elements, so that residuals stay valid for any layout.

        Args:
            bucket: The bucket.
            programs: The programs of the step.
            last: Whether it is the step's last bucket.
            strided_as: The tensors whose strides the bucket's gradients have. Empty: all are contiguous.
        """
        views = laid_out(bucket, strided_as) if strided_as else bucket.views()
        # Groups of a resumed run may end in another bucket than they began in, so every bucket of the step is
        # kept by name until its means are in it.
        pending = PendingBucket(bucket.buffer, views)
        self._pending.update(dict.fromkeys(bucket.names, pending))
        self._measure(bucket.names, bucket.shapes, bucket.buffer.element_size())
        groups = self.layout.complete(bucket.names, last)
        parts = [part for group in groups for part in self._divided(group, programs)]
        self._deferred += [part for part in parts if part.deferred]
        now = [part for part in parts if not part.deferred] + (self._joined() if last else [])
        pieces = [self._piece(part, bucket, views) for part in now]
        if last and not pieces:  # FSDP: no shard of the last group has numbers on this rank
            pieces = [Piece(Alone(), bucket, True)]
        return pieces, pending

    def scatter_back(self, piece: Piece, future: "torch.futures.Future[Any]") -> None:
        """Write a piece's means to the model's buckets when `future` completes."""
        bucket, pending = piece.bucket, self._pending
        own_names = tuple(name for name in bucket.names if name not in bucket.left_out)

        def deliver(done: "torch.futures.Future[Any]") -> None:
            means: Sequence[torch.Tensor | None]
            try:
                mean = done.value()
                if not piece.in_place:
                    means = unpack(mean, bucket.shapes)
                else:
                    means = [None] * len(own_names)
                    if mean.data_ptr() != bucket.buffer.data_ptr():
                        bucket.buffer.copy_(mean)
            except Exception as error:
                # An exception refers to its frames, and through them to the model: keep neither.
                error.__context__ = error.__cause__ = None
                for name in own_names:
                    pending[name].fail(error.with_traceback(None))
                return
            for name, own in zip(own_names, means, strict=True):
                pending[name].deliver(name, own)

        for name in own_names:
            pending[name].expect(future)
        future.add_done_callback(deliver)

    def _divided(self, group: tuple[str, ...], programs: Programs) -> list[BucketPart]:
        """Return the parts of a group, which stay the same as long as the programs do."""
        if self._parts_for is not programs:
            self._parts_for, self._parts = programs, {}
        if group not in self._parts:
            parts = parts_of(group, self._nbytes, programs)
            # After grouping: saved groups are the model's buckets, and a resumed run has the same slices.
            if programs.sliced:
                parts = [piece for part in parts for piece in part.sliced(self._nbytes)]
            self._parts[group] = parts
        return self._parts[group]

    def _measure(self, names: Sequence[str], shapes: Sequence[torch.Size], itemsize: int) -> None:
        for name, shape in zip(names, shapes, strict=True):
            self._nbytes[name] = itemsize * shape.numel()

    def _joined(self) -> list[BucketPart]:
        """Return the parts that waited for the last bucket, as few as programs and dtypes allow."""
        members: dict[tuple[int, torch.dtype], tuple[Program, list[str]]] = {}
        for part in self._deferred:
            dtype = self._pending[part.names[0]].views[part.names[0]].dtype
            members.setdefault((id(part.program), dtype), (part.program, []))[1].extend(part.names)
        return [BucketPart(program, tuple(names)) for program, names in members.values()]

    def _piece(self, part: BucketPart, bucket: Bucket, views: Mapping[str, torch.Tensor]) -> Piece:
        shared = consecutive(part.names, bucket)
        in_order = part.program.ignores_order or all(
            name in views and views[name].is_contiguous() for name in part.names
        )
        if shared is not None and in_order:
            if part.exact or part.left_out:
                shared = replace(shared, exact=part.exact, left_out=part.left_out)
            return Piece(part.program, shared, True)
        names = part.averaged
        copied = [self._pending[name].views[name] for name in names]
        shapes = tuple(view.shape for view in copied)
        own = replace(bucket, buffer=pack(copied), names=names, shapes=shapes, exact=part.exact)
        return Piece(part.program, own, False)


def laid_out(bucket: Bucket, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the bucket's gradients by name, as views with the strides in which DDP lays them out.

    DDP uses a parameter's strides (channels_last, a transpose) if these leave no gaps.
    """
    views = bucket.views()
    for (name, view), parameter in zip(views.items(), parameters, strict=True):
        if parameter.is_contiguous():
            continue
        real = real_numbers(parameter) if view.dim() > parameter.dim() else parameter
        order = sorted(range(real.dim()), key=real.stride, reverse=True)
        if real.permute(order).is_contiguous():
            views[name] = view.as_strided(real.shape, real.stride(), view.storage_offset())
    return views


class PendingBucket:
    """One of the model's buckets, whose means come from several exchanges."""

    def __init__(self, buffer: torch.Tensor, views: Mapping[str, torch.Tensor]) -> None:
        self.views = views
        self._buffer = buffer
        self._left = len(self.views)
        self._sources = 0
        self._writers = Writers(buffer.device)
        self.future = Result(buffer.device)
        """Completed with the bucket's buffer when all means are in it."""

    def expect(self, future: "torch.futures.Future[Any]") -> None:
        """Notify the engine that computes `future`, a part of the means, of waits for the bucket."""
        if self._sources == 0:  # all parts are programs of one step, so notifying its engine once is enough
            self.future.depend_on(future)
        self._sources += 1

    def deliver(self, name: str, mean: torch.Tensor | None) -> None:
        """Write a parameter's mean to the buffer. None means that the buffer already contains it."""
        if mean is not None:
            self.views[name].copy_(mean)
        self._writers.note()
        self._left -= 1
        if self._left == 0:
            self._writers.join()
            self.future.set_result(self._buffer)

    def fail(self, error: Exception) -> None:
        """Complete the future with an error."""
        if self._left > 0:
            self._left = -1
            self.future.fail(error)


def consecutive(names: Sequence[str], bucket: Bucket) -> Bucket | None:
    """Return consecutive parameters as a bucket that shares memory; None if they are not consecutive."""
    first = bucket.names.index(names[0]) if names[0] in bucket.names else 0
    if bucket.names[first : first + len(names)] != tuple(names):
        return None
    if len(names) == len(bucket.names):
        return bucket
    shapes = bucket.shapes[first : first + len(names)]
    start = sum(shape.numel() for shape in bucket.shapes[:first])
    buffer = bucket.buffer[start : start + sum(shape.numel() for shape in shapes)]
    return replace(bucket, buffer=buffer, names=tuple(names), shapes=shapes)


def groups_for(
    parameters: Mapping[str, torch.nn.Parameter], saved: Sequence[Sequence[str]]
) -> NameGroups | None:
    """Return saved groups, or None if they do not fit the parameters that train now."""
    groups = tuple(tuple(group) for group in saved)
    trained = sorted(name for name, parameter in parameters.items() if parameter.requires_grad)
    if sorted(name for group in groups for name in group) != trained:
        return None
    alike = all(len({parameters[name].dtype for name in group}) == 1 for group in groups)
    return groups if alike else None
