"""Owners step their parameters bucket by bucket, beside backward, on gradients that any hook has reduced."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from thinwire.programs.program import Bucket
from thinwire.sharding.pieces import Pieces
from thinwire.sharding.step import gradients_in
from thinwire.wire.communicator import Communicator
from thinwire.wire.engine import Engine
from thinwire.wire.ops import Await, Steps
from thinwire.wire.pack import pack, real_numbers

Gradients = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Parameters with their gradients."""


class Overlap:
    """Runs the owners' steps of one model in the static order, on a process group of its own.

    Making one is collective. Its thread ends with the model.

    Args:
        ddp: The model whose hook hands over buckets.
        owners: The owner of each parameter that is stepped, by the parameter's name.
        parameters: Those parameters by name.
        step: Steps some of this rank's own parameters.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        owners: Mapping[str, int],
        parameters: Mapping[str, torch.Tensor],
        step: Callable[[Gradients], None],
    ) -> None:
        communicator = Communicator(ddp.process_group)
        communicator.open()
        self._rank, self._size = communicator.rank, communicator.size
        self._owners, self._parameters, self._step = owners, parameters, step
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._engine = Engine(communicator, device=next(iter(parameters.values())).device)
        weakref.finalize(ddp, self._engine.close)

    def submit(
        self, bucket: dist.GradBucket, buffer: torch.Tensor, reduced: "torch.futures.Future[Any]", last: bool
    ) -> "torch.futures.Future[torch.Tensor]":
        """Step a bucket's parameters when its gradients are reduced, and send them to all ranks."""
        steps = self._run(bucket, buffer, reduced)
        return self._engine.submit(steps, label=f"bucket {bucket.index()}", last=last, instead=buffer)

    def settle_after_backward(self) -> None:
        """Have backward end only when all parameters are in place; it raises what went wrong."""
        queue = Variable._execution_engine.queue_callback
        queue(self._engine.guard)
        queue(lambda: queue(self._engine.settle))

    def _run(
        self, bucket: dist.GradBucket, buffer: torch.Tensor, reduced: "torch.futures.Future[Any]"
    ) -> Steps[torch.Tensor]:
        value = yield Await(reduced)
        result = value[0] if isinstance(value, list) else value
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result)
        bucket.set_buffer(buffer)  # a hook that casts has put another in its place
        held = [
            (self._names[id(parameter)], gradient)
            for parameter, gradient in gradients_in(buffer, bucket.parameters())
            if id(parameter) in self._names
        ]
        own = [
            (self._parameters[name], gradient) for name, gradient in held if self._owners[name] == self._rank
        ]
        if own:
            self._step(own)
        if held:
            yield from self._share([name for name, _ in held])
        return buffer

    def _share(self, names: list[str]) -> Steps[None]:
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
