"""Groups of parameters that are exchanged together: DDP's buckets, or those of the resumed run.

Some results depend on neighbours in a bucket, such as blocks of numbers that share a scale, or the order in
which ranks are summed. After a resume DDP's first buckets are not its final ones, and may have another size.
Keeping the saved groups makes these results equal to those of an uninterrupted run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.futures import Result
from thinwire.engine.pack import pack, real_numbers, unpack
from thinwire.engine.streams import Writers
from thinwire.models.ddp import internals
from thinwire.programs.program import Bucket

NameGroups = tuple[tuple[str, ...], ...]
"""Parameters' names, group by group, in the order in which gradients are exchanged."""


class BucketLayout:
    """The groups in which parameters are exchanged: DDP's buckets, unless others are held."""

    def __init__(self) -> None:
        self.held: NameGroups | None = None
        self.upcoming: NameGroups | None = None
        """The groups of the next step, as far as they are known."""
        self.again: NameGroups | None = None
        """The groups of a step that was rolled back, for the step that replaces it."""
        self.latest: list[tuple[str, ...]] = []
        """The groups of this step so far."""
        self._arrived: dict[str, None] = {}
        self._final: NameGroups | None = None
        """DDP's final buckets, once they are known."""

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
                there = tuple(name for name in group if name in self._arrived)
                if len(there) < len(group) and not last:
                    break
                groups.append(there)
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

    def foresee(self, ddp: DistributedDataParallel, names: Mapping[int, str]) -> None:
        """Make DDP lay out its final buckets after its first backward, instead of in the next forward.

        A state that is saved in between then contains them. The call is collective, so it does nothing inside
        Join, where some ranks may have run out of inputs.
        """
        if self.held is not None or internals.has_rebuilt_buckets(ddp) or internals.joins(ddp):
            return
        buckets = internals.rebuild_buckets(ddp)
        if buckets is not None:
            groups = (tuple(names[id(one)] for one in bucket.parameters()) for bucket in buckets)
            self.upcoming = self._final = tuple(groups)


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
    """One of DDP's buckets, whose means come from several exchanges."""

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


def together(names: Sequence[str], homes: Mapping[str, PendingBucket], like: Bucket) -> Bucket:
    """Copy parameters' gradients out of DDP's buckets into a new one.

    Args:
        names: The parameters.
        homes: DDP's bucket of each parameter.
        like: The bucket to take everything else from.
    """
    views = [homes[name].views[name] for name in names]
    shapes = tuple(view.shape for view in views)
    return replace(like, buffer=pack(views), names=tuple(names), shapes=shapes)


def run_of(names: Sequence[str], bucket: Bucket) -> Bucket | None:
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


def scatter_back(
    bucket: Bucket, homes: Mapping[str, PendingBucket], future: "torch.futures.Future[Any]", *, in_place: bool
) -> None:
    """Write a bucket's means to DDP's own buckets when `future` completes.

    Args:
        bucket: The bucket.
        homes: DDP's bucket of each parameter.
        future: The future of the means.
        in_place: Whether the bucket shares the memory of DDP's.
    """

    def deliver(done: "torch.futures.Future[Any]") -> None:
        means: Sequence[torch.Tensor | None]
        try:
            mean = done.value()
            if not in_place:
                means = unpack(mean, bucket.shapes)
            else:
                means = [None] * len(bucket.names)
                if mean.data_ptr() != bucket.buffer.data_ptr():
                    bucket.buffer.copy_(mean)
        except Exception as error:
            # An exception refers to its frames, and through them to the model: keep neither.
            error.__context__ = error.__cause__ = None
            for name in bucket.names:
                homes[name].fail(error.with_traceback(None))
            return
        for name, mean in zip(bucket.names, means, strict=True):
            homes[name].deliver(name, mean)

    for name in bucket.names:
        homes[name].expect(future)
    future.add_done_callback(deliver)


def groups_for(
    parameters: Mapping[str, torch.nn.Parameter], saved: Sequence[Sequence[str]]
) -> NameGroups | None:
    """Return saved groups, or None if they do not fit the parameters that train now."""
    groups = tuple(tuple(group) for group in saved)
    trained = sorted(name for name, one in parameters.items() if one.requires_grad)
    if sorted(name for group in groups for name in group) != trained:
        return None
    alike = all(len({parameters[name].dtype for name in group}) == 1 for group in groups)
    return groups if alike else None
