"""The programs of a step's buckets, run on whole buckets or on parts of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Program, Programs
from thinwire.step.layout import BucketLayout, PendingBucket, run_of, scatter_back, together
from thinwire.step.parts import BucketPart, parts_of
from thinwire.step.transaction import StepTransaction


class BucketRunner:
    """A runner of programs over a step's buckets, which it splits if parameters use different programs.

    Args:
        steps: The owner of the steps that the buckets belong to.
    """

    def __init__(self, steps: StepTransaction) -> None:
        self.steps = steps
        self.layout = BucketLayout()
        self._homes: dict[str, PendingBucket] = {}
        self._deferred: list[BucketPart] = []
        """Parts of this step's buckets that wait for the last bucket."""
        self._nbytes: dict[str, int] = {}
        self._parts: dict[tuple[str, ...], list[BucketPart]] = {}
        self._parts_for: Programs | None = None

    def _open(self) -> None:
        """Begin a step with its first bucket."""
        if not self.steps.is_open:
            self.steps.open()
            self._homes, self._deferred = {}, []

    def _close(self) -> None:
        """Close the step, after its last bucket."""
        self._homes, self._deferred = {}, []
        self.layout.end()
        self.steps.close()

    def _run_parts(
        self,
        programs: Programs,
        bucket: Bucket,
        views: Mapping[str, torch.Tensor],
        memory: Memory,
        last: bool,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Run programs on parts of a bucket, or of several buckets.

        Groups differ by program, and in a resumed run. A part works on DDP's own memory if possible. It is a
        copy if its parameters are not consecutive there, or not contiguous (channels_last). Programs get
        gradients, and keep residuals, in the order of the parameter's elements, so that residuals stay valid
        for any layout.
        """
        groups = self.layout.complete(bucket.names, last)
        itemsize = bucket.buffer.element_size()
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            self._nbytes[name] = itemsize * shape.numel()
        parts = [part for group in groups for part in self._divided(group, programs)]
        if [part.names for part in parts] == [bucket.names] and not (self._homes or parts[0].deferred):
            whole = self._in_place(parts[0], bucket, views)
            if whole is not None:
                return self.steps.submit(parts[0].program, whole, memory, last)
        home = PendingBucket(bucket.buffer, views)
        self._homes.update(dict.fromkeys(bucket.names, home))
        self._deferred += [part for part in parts if part.deferred]
        now = [part for part in parts if not part.deferred] + (
            _joined(self._deferred, self._homes) if last else []
        )
        for number, part in enumerate(now, 1):
            shared = self._in_place(part, bucket, views)
            own = shared or replace(together(part.names, self._homes, bucket), exact=part.exact)
            future = self.steps.submit(part.program, own, memory, last and number == len(now))
            scatter_back(own, self._homes, future, in_place=shared is not None)
        return home.future

    def _divided(self, group: tuple[str, ...], programs: Programs) -> list[BucketPart]:
        """Return the parts of a group, which stay the same as long as the programs do."""
        if self._parts_for is not programs:
            self._parts_for, self._parts = programs, {}
        if group not in self._parts:
            parts = parts_of(group, self._nbytes, programs)
            if programs.sliced:
                parts = [one for part in parts for one in part.sliced(self._nbytes)]
            self._parts[group] = parts
        return self._parts[group]

    def _in_place(self, part: BucketPart, bucket: Bucket, views: Mapping[str, torch.Tensor]) -> Bucket | None:
        """Return a part of DDP's bucket that shares its memory, or None if the program needs a copy."""
        shared = run_of(part.names, bucket)
        if shared is None:
            return None
        if not part.program.ignores_order and not all(views[name].is_contiguous() for name in part.names):
            return None
        return replace(shared, exact=part.exact) if part.exact else shared


def _joined(late: Sequence[BucketPart], homes: Mapping[str, PendingBucket]) -> list[BucketPart]:
    """Return the parts that waited for the last bucket, as few as programs and dtypes allow."""
    members: dict[tuple[int, torch.dtype], tuple[Program, list[str]]] = {}
    for part in late:
        dtype = homes[part.names[0]].views[part.names[0]].dtype
        members.setdefault((id(part.program), dtype), (part.program, []))[1].extend(part.names)
    return [BucketPart(program, tuple(names)) for program, names in members.values()]
