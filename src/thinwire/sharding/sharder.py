"""Runs ZeRO for one model: gradients to owners, owners' steps, parameters back to all."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.errors import StateError, UnavailableError
from thinwire.programs.memory import Memory
from thinwire.programs.overflow import all_finite
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.programs.sound import check_tensor
from thinwire.sharding.assignment import owners
from thinwire.sharding.clip import Scale, compare_factors, norm_of, total_norm
from thinwire.sharding.collect import collect
from thinwire.sharding.pieces import Pieces
from thinwire.sharding.reduce import reduce_to_owners
from thinwire.sharding.state import merged
from thinwire.sharding.step import gradients_in, refuse_scalers, step_some
from thinwire.sharding.zero import ZeRO
from thinwire.wire.communicator import Communicator
from thinwire.wire.engine import Engine
from thinwire.wire.meter import PARAMETERS
from thinwire.wire.ops import AllReduce, Steps
from thinwire.wire.pack import pack, real_numbers, unpack

_BUCKET_BYTES = 25 << 20


class Sharder:
    """Knows who owns what, and runs the two exchanges; the optimizer stays the user's.

    Making one is collective. It keeps neither the model nor the optimizer alive.
    """

    def __init__(
        self,
        zero: ZeRO,
        ddp: DistributedDataParallel,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: Optimizer,
        communicator: Communicator,
        gradients: Engine,
    ) -> None:
        self._zero = zero
        self._steps = gradients
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self._optimizer = optimizer
        self._rank, self._size = communicator.rank, communicator.size
        sizes = {name: one.numel() for name, one in parameters.items()}  # DDP may reduce frozen ones too
        self.owners = owners(sizes, self._size, spread=zero.shard_buckets)
        self._every = dict(parameters)
        self._own = {name: one for name, one in self._parameters.items() if self.owners[name] == self._rank}
        self._masters: dict[str, torch.Tensor] = {}
        self._finite = True
        self._scale = Scale()
        device = next(iter(parameters.values())).device
        self._engine = Engine(communicator, device=device, meter=gradients.meter, purpose=PARAMETERS)
        weakref.finalize(ddp, self._engine.close)
        self._lent: torch.Tensor | None = None
        self._delivered = self._looked = False
        self._left: list[torch.Tensor] = []
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(self._forward),
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(self._step_ends),
        ]
        weakref.finalize(ddp, _remove, self._handles)

    def close(self) -> None:
        """Stop sharding."""
        _remove(self._handles)
        self._engine.close()

    def by(self, program: Program) -> Program:
        """What becomes of a bucket's gradients, which owners shall get by `program`."""
        return partial(self._reduce, program)

    def _reduce(self, program: Program, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        pieces = Pieces.of(bucket, self.owners)
        mean = yield from reduce_to_owners(program, bucket, pieces, memory)
        names = pieces.names[self._rank]
        if self._zero.interleaved:
            self._step(names, mean)
            yield from self._share(pieces)
            return Outcome(bucket.buffer, finite=True)
        into = bucket.views()
        for name, gradient in zip(names, unpack(mean, pieces.shapes[self._rank]), strict=True):
            into[name].copy_(gradient)
        return Outcome(bucket.buffer, finite=all_finite(mean))

    def _forward(self, module: object, inputs: object) -> None:
        """Look what gradients are left of a backward that no step has followed.

        Only the first forward after it can tell: later ones may find those of micro-batches, after a step
        that a GradScaler has skipped.
        """
        if not torch.is_grad_enabled():
            return
        held = self._gradients()
        if self._delivered:
            self._left = [gradient for gradient in held if gradient.any()]
        else:
            self._left = [gradient for gradient in held if any(gradient is left for left in self._left)]
        self._delivered = False

    def before_backward(self) -> None:
        """Refuse to add to means that only their owners hold: of those, only a part would count."""
        if self._zero.interleaved and not self._looked:
            refuse_scalers("use interleaved=False")
            self._looked = True
        if any(gradient is left for gradient in self._gradients() for left in self._left):
            raise UnavailableError(
                "a second backward adds to gradients that were exchanged already, which ZeRO's owners hold"
                " alone: wrap all but the last backward of a step in ddp.no_sync(), or call zero_grad()"
            )
        self._left = []

    def after_backward(self) -> None:
        """DDP has written the gradients: only owners keep theirs."""
        kept = {} if self._zero.interleaved else self._own
        for name, parameter in self._parameters.items():
            if name not in kept:
                parameter.grad = None
        if self._zero.interleaved:
            return
        self._stand_in()
        self._delivered = True
        self._scale.remember(self._gradients())

    def _stand_in(self) -> None:
        """A rank that has no gradient of its own gets one: a GradScaler refuses to step without any."""
        held = [one for group in self._optimizer.param_groups for one in group["params"] if one.numel()]
        if held and not self._gradients():
            self._lent = min(held, key=torch.Tensor.numel)
            self._lent.grad = torch.full_like(self._lent, 0.0 if self._finite else math.nan)

    def clip(self, max_norm: float, kind: float) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; the norm before."""
        if self._zero.interleaved:
            raise UnavailableError(
                "clip_grad_norm_ comes too late with ZeRO(interleaved=True), which steps inside backward: use"
                " interleaved=False"
            )
        own = self._gradients()
        with torch.no_grad():
            total = self._run(total_norm(norm_of(own, kind).to(self._device), kind), "the norm of gradients")
            factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's own formula
            for gradient in own:
                gradient.mul_(factor.to(gradient.dtype))
        self._scale.forget()
        return total

    def collect(self, to: int) -> dict[str, Any] | None:
        """The whole optimizer state on rank `to`, one owner's at a time; None elsewhere."""
        own: dict[str, Any] = self._optimizer.state_dict()
        states: list[dict[Any, Any]] = []

        def collecting() -> Steps[torch.Tensor]:
            states.extend((yield from collect(own["state"], self._rank, self._size, to, self._device)))
            return torch.zeros(0, device=self._device)

        self._run(collecting(), "the optimizer's state")
        return None if self._rank != to else merged([{**own, "state": state} for state in states])

    def state_dict(self) -> dict[str, Any]:
        """What owners keep beyond the optimizer's state: what rounded parameters lost."""
        return {"masters": {name: master.clone() for name, master in self._masters.items()}}

    def prepare(self, state: object) -> Callable[[], None]:
        """Check a saved state; what is returned takes it over."""
        masters = state.get("masters") if isinstance(state, dict) else None
        if not isinstance(masters, dict):
            raise StateError("the state has nothing under 'sharding': it was not saved from a wire with ZeRO")
        for name, master in masters.items():
            check_tensor(f"master of {name}", master)
            own = self._parameters.get(name)
            if own is None or master.shape != own.shape or not master.is_floating_point():
                raise StateError(f"the saved master of {name} does not fit this model's parameter")
        mine = {
            name: masters[name].detach().to(own.device, own.dtype, copy=True)
            for name, own in self._own.items()
            if name in masters
        }

        def take_over() -> None:
            self._masters = mine

        return take_over

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self._own.values() if one.grad is not None]

    def agree(self, finite: bool) -> bool:
        """Whether the step's gradients are finite on all ranks: each has looked at its own means only."""
        flag = torch.tensor([float(not finite)], device=self._device)
        self._finite = not self._run(_summed(flag), "the overflow check").item()
        return self._finite

    def _run(self, steps: Steps[torch.Tensor], label: str) -> torch.Tensor:
        """Run a program, behind those that were submitted, and wait for all."""
        self._engine.step = self._steps.step
        nothing = torch.zeros(0, device=self._device)
        future = self._engine.submit(steps, label=label, last=True, instead=nothing)
        self._engine.guard()
        self._engine.settle()
        result: torch.Tensor = future.wait()
        return result

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is not None and (self._zero.interleaved or self._zero.parameters):
            raise UnavailableError(
                "step(closure) was called, but with ZeRO(interleaved=True) the step is inside backward, and"
                " with parameters= a forward inside the step would see unrounded parameters: use ZeRO()"
                " without these, or call backward before step()"
            )
        for name, parameter in self._parameters.items():
            if name not in self._own:
                optimizer.state.pop(parameter, None)  # a state that was loaded whole
        self._delivered, self._left = False, []
        if self._lent is not None:
            self._lent.grad = None
            self._lent = None
        if not self._zero.interleaved:
            self._unround(self._own)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._zero.interleaved:
            return
        factor = self._scale.factor(self._gradients())
        with torch.no_grad():
            nothing = torch.zeros(0, device=self._device)
            self._engine.step = self._steps.step
            for bucket in self._chunks():
                steps = self._share(Pieces.of(bucket, self.owners))
                self._engine.submit(steps, label=bucket, last=False, instead=nothing)
            self._run(compare_factors(factor, self._device), "the comparison of clipping")

    def _chunks(self) -> Iterator[Bucket]:
        """The model's parameters in buckets of one dtype."""
        names: list[str] = []
        filled = 0
        for name, parameter in sorted(self._parameters.items(), key=lambda item: str(item[1].dtype)):
            other = names and self._parameters[names[0]].dtype != parameter.dtype
            if other or (names and filled + parameter.nbytes > _BUCKET_BYTES):
                yield self._chunk(names)
                names, filled = [], 0
            names.append(name)
            filled += parameter.nbytes
        yield self._chunk(names)

    def _chunk(self, names: list[str]) -> Bucket:
        like = self._parameters[names[0]]
        shapes = tuple(real_numbers(self._parameters[name]).shape for name in names)
        return Bucket(0, like.new_empty(0), tuple(names), shapes, self._rank, self._size, 0)

    def _step(self, names: Sequence[str], mean: torch.Tensor) -> None:
        """Step some of our own parameters with the user's optimizer as it is set now."""
        owned = [self._every[name] for name in names]
        gradients = [pair for pair in gradients_in(mean, owned) if pair[0].requires_grad]
        if gradients:
            self._unround([name for name in names if name in self._own])
            step_some(self._optimizer, gradients)

    def _unround(self, names: Iterable[str]) -> None:
        """Owners step what they have in full."""
        with torch.no_grad():
            for name in names:
                master = self._masters.get(name)
                if master is None:
                    continue
                rounded = master.to(torch.bfloat16).to(master.dtype)
                own = self._own[name]
                own.copy_(torch.where(own == rounded, master, own))  # what the user has set since, stays

    def _share(self, pieces: Pieces) -> Steps[torch.Tensor]:
        """Owners send what they have stepped, rounded if asked; all ranks copy it in."""
        names = pieces.names[self._rank]
        every = [name for own in pieces.names for name in own]
        like = self._every[every[0]]
        travel = self._zero.parameters or like.dtype
        numbers = [real_numbers(self._every[name]) for name in names]
        if travel != like.dtype and like.is_floating_point():
            for name in names:
                self._masters[name] = self._every[name].detach().clone()
            numbers = [one.to(travel) for one in numbers]
        kind = travel if like.is_floating_point() else real_numbers(like).dtype
        own = pack(numbers) if numbers else torch.empty(0, dtype=kind, device=like.device)
        shared = yield from pieces.share(own, self._rank)
        for name, tensor in shared.items():
            if self.owners[name] != self._rank or name in self._masters:
                real_numbers(self._every[name]).copy_(tensor)
        return own


def _summed(tensor: torch.Tensor) -> Steps[torch.Tensor]:
    total: torch.Tensor = yield AllReduce(tensor)
    return total


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
