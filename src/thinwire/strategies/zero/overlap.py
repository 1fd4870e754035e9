"""Owners' steps bucket by bucket, overlapped with backward, on gradients that any hook has reduced."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.ops import AllReduce, Await, Collectives
from thinwire.engine.pack import pack, real_numbers
from thinwire.models.ddp.internals import after_ddp_finishes
from thinwire.programs.program import Bucket
from thinwire.step.autograd import queue_callback
from thinwire.strategies.zero.exchanges import Pieces
from thinwire.strategies.zero.owner_step import gradients_in

Gradients = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a parameter and its gradient."""
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""The same by name."""


class Usage:
    """Parameters that backward has reached on this rank since the last step.

    DDP keeps such a map too, but exposes it only after it has summed all ranks' maps, after the last bucket.
    Like DDP's, it accumulates over backward passes under `no_sync`.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._reached: set[int] = set()
        self.handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for parameter in parameters
            if parameter.requires_grad
        ]
        """The hooks' handles, to remove them."""

    def of(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Return the `id` of each of a bucket's parameters that this rank has used.

        The result is final, because DDP passes a bucket to its hook only when each of its parameters has a
        gradient or is known to get none.
        """
        return {id(parameter) for parameter in parameters} & self._reached

    def clear(self) -> None:
        """Forget all parameters, to begin another step."""
        self._reached.clear()

    def _note(self, parameter: torch.Tensor) -> None:
        self._reached.add(id(parameter))


@dataclass(frozen=True)
class _Undecided:
    """The parameters of one bucket, some of which may have been used only by other ranks."""

    names: list[str]
    gradients: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Own parameters that this rank has not used or stepped yet, with their gradients."""
    used: torch.Tensor
    """For each name, how many ranks used the parameter, and whether its owner did."""


class Overlap:
    """The owners' steps of one model, run in the static order on a separate process group.

    Constructing one is collective. Its thread ends with the model.

    Args:
        ddp: The model whose hook passes buckets.
        owners: The owner of each parameter that is stepped, by name.
        parameters: Those parameters by name.
        step: A function that steps some of this rank's own parameters.
        usage: The parameters in use, if some may be unused. Parameters that no rank used are not stepped, as
            plain DDP leaves them without a gradient. Parameters that only other ranks than their owner used
            are stepped after backward, because the host may read the ranks' usage only then.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        owners: Mapping[str, int],
        parameters: Mapping[str, torch.Tensor],
        step: Callable[[Gradients], None],
        usage: Usage | None = None,
    ) -> None:
        communicator = GroupCommunicator(ddp.process_group, device=next(iter(parameters.values())).device)
        communicator.open()
        self._rank, self._size = communicator.rank, communicator.size
        self._owners, self._parameters, self._step = owners, parameters, step
        self._usage = usage
        self._undecided: list[_Undecided] = []
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._engine = Engine(communicator, device=next(iter(parameters.values())).device)
        self._count = 0
        weakref.finalize(ddp, self._engine.close)

    def submit(
        self, bucket: dist.GradBucket, buffer: torch.Tensor, reduced: "torch.futures.Future[Any]", last: bool
    ) -> "torch.futures.Future[torch.Tensor]":
        """Step a bucket's parameters when its gradients are reduced, and send them to all ranks.

        Args:
            bucket: DDP's bucket.
            buffer: Its buffer.
            reduced: A future of the reduced gradients.
            last: Whether this is the last bucket of the backward pass.

        Returns:
            A future of the buffer with the reduced gradients.
        """
        used_here = None if self._usage is None else self._usage.of(bucket.parameters())
        if self._usage is not None and last:
            self._usage.clear()
        steps = self._run(bucket, buffer, reduced, used_here)
        label, count = f"bucket {bucket.index()}", self._count
        self._count += last
        stepped = self._engine.submit(steps, step=count, label=label, last=last, instead=buffer)
        stepped.depend_on(reduced)  # a hook that waits for the step waits for the reduction too
        return stepped

    def settle_after_backward(self) -> None:
        """Make backward wait until all parameters are updated, and raise any failure."""
        queue_callback(self._engine.guard)
        after_ddp_finishes(self._finish)

    def _finish(self) -> None:
        """Wait for all steps, then step the parameters that only ranks other than their owners used."""
        self._engine.settle()
        undecided, self._undecided = self._undecided, []
        if not undecided:
            return
        used = torch.cat([bucket.used for bucket in undecided], dim=1).T.tolist()  # the only read
        late: list[list[str]] = []
        for bucket in undecided:
            counts, used = used[: len(bucket.names)], used[len(bucket.names) :]
            names = [
                name for name, (ranks, owner) in zip(bucket.names, counts, strict=True) if ranks > owner == 0
            ]
            own = [bucket.gradients[name] for name in names if name in bucket.gradients]
            if own:
                self._step(own)
            if names:
                late.append(names)
        self._share_late(late)

    def _share_late(self, late: list[list[str]]) -> None:
        for number, names in enumerate(late, 1):
            like, last = self._parameters[names[0]], number == len(late)
            steps = self._share(names)
            self._engine.submit(steps, step=self._count, label="late parameters", last=last, instead=like)
        self._engine.guard()
        self._engine.settle()

    def _run(
        self,
        bucket: dist.GradBucket,
        buffer: torch.Tensor,
        reduced: "torch.futures.Future[Any]",
        used_here: set[int] | None,
    ) -> Collectives[torch.Tensor]:
        # Wait for the inner hook's mean in this program's turn, so that steps keep the static order.
        value = yield Await(reduced)
        result = value[0] if isinstance(value, list) else value
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result)
        bucket.set_buffer(buffer)  # a hook that casts has replaced it
        pairs = gradients_in(buffer, bucket.parameters())
        held = {self._names[id(pair[0])]: pair for pair in pairs if id(pair[0]) in self._names}
        own = {name: pair for name, pair in held.items() if self._owners[name] == self._rank}
        if used_here is not None and held:
            # This rank may step what it has used itself. Whether another rank used the rest is known to the
            # host only after backward, so those parameters wait for `_finish`.
            yield from self._sum_usage(used_here, held, own)
            own = {name: pair for name, pair in own.items() if id(pair[0]) in used_here}
        if own:
            self._step(list(own.values()))
        if held:
            yield from self._share(list(held))
        return buffer

    def _sum_usage(self, used_here: set[int], held: Pairs, own: Pairs) -> Collectives[None]:
        """Sum over all ranks which parameters are used, to be read after backward."""
        here = [float(id(parameter) in used_here) for parameter, _ in held.values()]
        by_owner = [flag * (name in own) for name, flag in zip(held, here, strict=True)]
        device = next(iter(held.values()))[1].device
        flags = torch.tensor([here, by_owner], dtype=torch.float32, device="cpu")
        used = yield AllReduce(flags.to(device, non_blocking=True))
        unused = {name: pair for name, pair in own.items() if id(pair[0]) not in used_here}
        self._undecided.append(_Undecided(list(held), unused, used))

    def _share(self, names: list[str]) -> Collectives[torch.Tensor]:
        tensors = {name: real_numbers(self._parameters[name]) for name in names}
        like = tensors[names[0]]
        shapes = tuple(tensors[name].shape for name in names)
        bucket = Bucket(0, like.new_empty(0), tuple(names), shapes, self._rank, self._size, 0)
        pieces = Pieces.of(bucket, self._owners)
        mine = pieces.names[self._rank]
        own = pack([tensors[name] for name in mine]) if mine else like.new_empty(0)
        shared = yield from pieces.share(own, self._rank)
        for name, tensor in shared.items():
            if self._owners[name] != self._rank:
                tensors[name].copy_(tensor)
        return own
