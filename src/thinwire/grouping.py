"""Which parameters travel together: DDP's buckets, or those of the run that is resumed.

Whatever depends on neighbours in a bucket (blocks of numbers that share a scale, the order in which ranks
are summed up) comes out the same after a resume, although DDP's first buckets are not its final ones, and may
have another size by then.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from thinwire.programs.program import Bucket
from thinwire.wire.pack import pack, unpack
from thinwire.wire.track import unwrap

Groups = tuple[tuple[str, ...], ...]
"""Parameters' names, group by group, in the order in which gradients are exchanged."""


class Grouping:
    """Follows DDP's buckets, unless it holds other groups."""

    def __init__(self) -> None:
        self.held: Groups | None = None
        self.upcoming: Groups | None = None
        """The groups of the next step, as far as anybody can tell."""
        self._again: Groups | None = None
        self._latest: list[tuple[str, ...]] = []
        self._arrived: dict[str, None] = {}

    def complete(self, names: tuple[str, ...], last: bool) -> list[tuple[str, ...]]:
        """DDP hands over a bucket: the groups whose gradients are all there now, in order."""
        wanted = self._again or self.held
        if wanted is None:
            groups = [names]
        else:
            self._arrived.update(dict.fromkeys(names))
            groups = []
            for group in wanted[len(self._latest) :]:
                there = tuple(name for name in group if name in self._arrived)
                if len(there) < len(group) and not last:
                    break
                groups.append(there)
            if last:  # parameters that those do not know
                known = {name for group in wanted for name in group}
                groups.append(tuple(name for name in self._arrived if name not in known))
        self._latest += groups
        return [group for group in groups if group]

    def end(self) -> None:
        """The step's last bucket has come."""
        self.upcoming = tuple(group for group in self._latest if group)
        self._latest, self._arrived, self._again = [], {}, None

    def repeat(self) -> None:
        """The step did not count: the next one takes its place, and its groups."""
        self._again = self.upcoming

    def foresee(self, ddp: DistributedDataParallel, names: Mapping[int, str]) -> None:
        """After its first backward, have DDP lay out its final buckets, which it would with the next forward.

        So that what is saved in between knows them. It is collective, and all ranks are at the same point,
        unless some have run out of inputs (Join).
        """
        known = self.held is not None or ddp._has_rebuilt_buckets
        if known or ddp._join_config.enable or not ddp.reducer._rebuild_buckets():
            return
        ddp._has_rebuilt_buckets = True
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        self.upcoming = tuple(tuple(names[id(one)] for one in bucket.parameters()) for bucket in buckets)


class Home:
    """One of DDP's buckets, whose parameters' means come from several exchanges."""

    def __init__(self, bucket: Bucket) -> None:
        self.views = bucket.views()
        self._buffer = bucket.buffer
        self._left = len(self.views)
        on_device: list[Any] = [] if bucket.buffer.device.type == "cpu" else [bucket.buffer.device]
        self._promise: torch.futures.Future[Any] = torch.futures.Future(devices=on_device)
        self.future = self._promise.then(unwrap)
        """Holds the bucket's buffer when all means are in it."""

    def deliver(self, name: str, mean: torch.Tensor) -> None:
        """Take in a parameter's mean."""
        self.views[name].copy_(mean)
        self._left -= 1
        if self._left == 0:
            self._promise.set_result(self._buffer)

    def fail(self, error: Exception) -> None:
        """There will be no mean."""
        if self._left > 0:
            self._left = -1
            self._promise.set_result(error)


def together(names: Sequence[str], homes: Mapping[str, Home], like: Bucket, index: int) -> Bucket:
    """A bucket of parameters that DDP has put elsewhere."""
    views = [homes[name].views[name] for name in names]
    return Bucket(
        index,
        pack(views),
        tuple(names),
        tuple(view.shape for view in views),
        like.rank,
        like.world_size,
        like.step,
    )


def bring_home(bucket: Bucket, homes: Mapping[str, Home], future: "torch.futures.Future[Any]") -> None:
    """When the means are there, write them to where DDP looks for them."""

    def deliver(done: "torch.futures.Future[Any]") -> None:
        try:
            means = unpack(done.value(), bucket.shapes)
        except Exception as error:
            # Without its past: exceptions remember frames, and those know the model.
            error.__context__ = error.__cause__ = None
            for name in bucket.names:
                homes[name].fail(error.with_traceback(None))
            return
        for name, mean in zip(bucket.names, means, strict=True):
            homes[name].deliver(name, mean)

    future.add_done_callback(deliver)


def groups_for(parameters: Mapping[str, torch.nn.Parameter], saved: Sequence[Sequence[str]]) -> Groups | None:
    """Groups that were saved, for these parameters; None where they are not the same any more."""
    groups = tuple(tuple(group) for group in saved)
    trained = sorted(name for name, one in parameters.items() if one.requires_grad)
    if sorted(name for group in groups for name in group) != trained:
        return None
    alike = all(len({parameters[name].dtype for name in group}) == 1 for group in groups)
    return groups if alike else None
