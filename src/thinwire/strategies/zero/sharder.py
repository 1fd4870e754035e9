"""ZeRO on one model: gradients to owners, owners' steps, parameters to all ranks.

The phases of a step, and where each runs:

    assign      every parameter gets one owner, by sizes alone               `__init__`
    reduce      owners receive the mean gradients of their parameters        `_reduce`, in backward
    step        the user's optimizer steps the parameters with gradients,    `optimizer.step()`, or with
                which are this rank's own, and keeps state for those alone   `interleaved` in `_reduce`
    all-gather  every rank receives the updated parameters of all owners     `_share`, after the step
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.amp.loss_scale import check_no_scaler
from thinwire.checkpoint.gather import collect
from thinwire.checkpoint.optimizer_state import forget_owned, mark_owned, merge_optimizer_states
from thinwire.checkpoint.validate import check_tensor
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.futures import at_work
from thinwire.engine.meter import PARAMETERS
from thinwire.engine.ops import AllReduce, Collectives
from thinwire.engine.pack import pack, real_numbers, unpack
from thinwire.errors import StateError, UnavailableError
from thinwire.models.ddp.model import require_ddp
from thinwire.programs.finite import all_true, finite
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, ProgramFunction
from thinwire.step.autograd import remove_handles
from thinwire.step.model import refuse_unfrozen
from thinwire.step.strategy import Context, Strategy
from thinwire.strategies.zero.assignment import owners
from thinwire.strategies.zero.exchanges import Pieces, reduce_to_owners
from thinwire.strategies.zero.overlap import Usage
from thinwire.strategies.zero.owner_step import Versions, gradients_in, norm_of, step_some, total_norm
from thinwire.strategies.zero.zero import ZeRO

_BUCKET_BYTES = 25 << 20
_CHANGED = (
    "gradients were changed between backward and optimizer.step(). Under ZeRO a rank has the gradients of its"
    " own parameters only, so torch.nn.utils.clip_grad_norm_ takes a part of the norm, and clips too little:"
    " use wire.clip_grad_norm_(max_norm). After a change that needs no norm, such as clip_grad_value_, call"
    " wire.clip_grad_norm_(math.inf), which takes the gradients as they are"
)

_ADDED = (
    "this backward adds to gradients that were already exchanged. Under ZeRO only their owners hold those, so"
    " the mean would take 1/W of them, where plain DDP takes all: call optimizer.zero_grad() before the first"
    " backward of a step, and wrap all but the last backward of a step in ddp.no_sync()"
)


class Sharder(Strategy):
    """The strategy of `ZeRO`. It assigns owners to parameters and runs both exchanges.

    The user's optimizer keeps stepping. Constructing a sharder is collective. It keeps neither the model nor
    the optimizer alive.
    """

    supports_join = False
    config: ZeRO

    def __init__(self, config: ZeRO, context: Context) -> None:
        super().__init__(config, context)
        model, zero = require_ddp(context.model, repr(config)), config
        parameters, (optimizer,) = model.parameters(), context.optimizers()
        communicator = GroupCommunicator(model.group, context.communicator.limit, model.device)
        communicator.open()
        self._parameters = {name: held for name, held in parameters.items() if held.requires_grad}
        self._frozen = {name: held for name, held in parameters.items() if not held.requires_grad}
        self._optimizer = optimizer
        self._rank, self._size = communicator.rank, communicator.size
        # Frozen parameters have owners too, because DDP may reduce their gradients. Owners do not depend on
        # buckets, which DDP rebuilds after the first backward.
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self.owners = owners(sizes, self._size, spread=zero.shard_buckets)
        self._every = dict(parameters)
        """All parameters, frozen ones too."""
        self._own = {name: held for name, held in self._parameters.items() if self.owners[name] == self._rank}
        self._masters: dict[str, torch.Tensor] = {}
        """Own parameters before they were rounded to the dtype in which they are sent."""
        self._versions = Versions()
        self._changed = False
        self._overflowed = self._skips = False
        """Whether the latest backward overflowed, and whether the current step is skipped for it."""
        meter = context.engine.meter
        self._engine = Engine(communicator, device=model.device, meter=meter, purpose=PARAMETERS)
        model.on_gone(self._engine.close)
        self._lent: torch.Tensor | None = None
        """The parameter that has a placeholder gradient, see `_stand_in`."""
        self._scalers_checked = context.steps.scales.named
        self._exchanged: set[str] = set()
        """Own parameters that no backward has reached since their gradient was exchanged."""
        self._added_to: dict[str, torch.Tensor] = {}
        """For own parameters, whether this backward has added to a gradient that was already exchanged."""
        self._handles: list[Any] = [
            model.on_forward(self._check_frozen),
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(self._step_ends),
            optimizer.register_state_dict_post_hook(self._save),
        ]
        self._used: dict[str, bool] = {}
        self._usage = Usage(self._parameters.values()) if config.interleaved and model.static_graph else None
        if not config.interleaved and self._size > 1:
            self._handles += [
                parameter.register_hook(partial(self._reach, name)) for name, parameter in self._own.items()
            ]
        model.on_gone(remove_handles, self._handles)

    def close(self) -> None:
        """Stop sharding, and remove all hooks."""
        remove_handles(self._handles)
        remove_handles(self._usage.handles if self._usage is not None else [])
        self._engine.close()

    def wrap(self, program: Program) -> ProgramFunction:
        """Return a program that reduces a bucket's gradients to their owners by `program`."""
        return partial(self._reduce, program)

    def _reduce(self, program: Program, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        # Reduce: the mean of this rank's own gradients in the bucket.
        pieces = Pieces.of(bucket, self.owners)
        mean = yield from reduce_to_owners(program, bucket, pieces, memory)
        names = pieces.names[self._rank]
        if self.config.interleaved:
            # Step and all-gather, while backward computes the gradients of earlier layers. Backward has used
            # this bucket's parameters already, so they may change under it.
            unused = yield from self._unused_in(bucket)
            self._step(names, mean, unused)
            yield from self._share(pieces)
            # Only owners have seen the means, but all ranks have the parameters that were stepped with them.
            stepped = [finite(self._parameters[name]) for name in bucket.names if name in self._parameters]
            return Outcome(bucket.buffer, finite=all_true(stepped) if stepped else finite(mean[:0]))
        # DDP copies the whole buffer to `.grad`. What it holds of other owners' parameters is dropped in
        # `end_backward`.
        into = bucket.views()
        for name, gradient in zip(names, unpack(mean, pieces.shapes[self._rank]), strict=True):
            into[name].copy_(gradient)
        return Outcome(bucket.buffer, finite=finite(mean))

    def _unused_in(self, bucket: Bucket) -> Collectives[set[str]]:
        """Return the parameters of a bucket that no rank uses under static_graph, which are not stepped.

        They are the same in every step, so each is looked up once. Plain DDP leaves them without a gradient,
        while a zero gradient would change them by momentum and weight decay.
        """
        if self._usage is None:
            return set()
        if not self._used.keys() >= set(bucket.names):
            reached = self._usage.of(self._every[name] for name in bucket.names)
            here = [float(id(self._every[name]) in reached) for name in bucket.names]
            counts = yield AllReduce(torch.tensor(here, dtype=torch.float32, device=bucket.buffer.device))
            self._used.update(zip(bucket.names, map(bool, counts.tolist()), strict=True))  # first step only
        return {name for name in bucket.names if not self._used[name]}

    def _reach(self, name: str, gradient: torch.Tensor | None = None) -> None:
        """Note, before backward adds to an own gradient, whether that one was already exchanged.

        Gradients of micro-batches under `no_sync` were not. One that `zero_grad` has set to zero does not
        matter. The host does not read the flag here, because backward is running.
        """
        held = self._own[name].grad
        if held is None:
            self._added_to.pop(name, None)
        elif name in self._exchanged:
            self._added_to[name] = held.any()
        self._exchanged.discard(name)

    def _check_frozen(self) -> None:
        refuse_unfrozen(
            self._frozen,
            "its owner does not share it",
            "wrap the module in a new DistributedDataParallel after unfreezing it, load"
            " wire.consolidate_optimizer_state() on every rank, and attach",
        )

    def begin_step(self) -> None:
        """Raise if steps inside this backward would lack their state, or precede a GradScaler's unscaling."""
        if self.config.interleaved and self.missing is not None:
            raise StateError(self.missing)
        if self.config.interleaved and not self._scalers_checked:
            check_no_scaler("use interleaved=False")
            self._scalers_checked = True

    def end_backward(self, committed: bool) -> None:
        """Drop the gradients of other owners' parameters, now that DDP has written them."""
        self._drop_gradients()
        if self._usage is not None:
            remove_handles(self._usage.handles)  # all buckets have been looked up
        if self.config.interleaved:
            return
        self._stand_in(0.0 if committed else math.nan)
        self._overflowed = not committed
        self._versions.remember(self._named_gradients())

    def _drop_gradients(self) -> None:
        kept = {} if self.config.interleaved else self._own
        for name, parameter in self._parameters.items():
            if name not in kept:
                parameter.grad = None
        self._exchanged = set(kept)

    def _stand_in(self, value: float) -> None:
        """Set a placeholder gradient on a rank that owns none. A GradScaler cannot step without one."""
        held = [
            tensor for group in self._optimizer.param_groups for tensor in group["params"] if tensor.numel()
        ]
        if held and not self._gradients():
            self._lent = min(held, key=torch.Tensor.numel)
            self._lent.grad = torch.full_like(self._lent, value)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale all gradients to a norm over all ranks of at most `max_norm`. Return the old norm."""
        kind = norm_type
        if self.config.interleaved:
            raise UnavailableError(
                "clip_grad_norm_ comes too late with ZeRO(interleaved=True), which steps inside backward: use"
                " interleaved=False"
            )
        own = self._gradients()
        with at_work(), torch.no_grad():
            total = self._run(total_norm(norm_of(own, kind).to(self._device), kind), "the norm of gradients")
            factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's own formula
            for gradient in own:
                gradient.mul_(factor.to(gradient.dtype))
            self._versions.remember(self._named_gradients())  # earlier changes are accepted
        return total

    def consolidate_optimizer_state(self, to: int) -> dict[str, Any] | None:
        """Return the whole optimizer state on rank `to`, collected shard by shard, and None on the others."""
        own: dict[str, Any] = self._optimizer.state_dict()
        forget_owned(own["param_groups"])
        states: list[dict[Any, Any]] = []

        def collecting() -> Collectives[torch.Tensor]:
            states.extend((yield from collect(own["state"], self._rank, self._size, to, self._device)))
            return self._nothing()

        self._run(collecting(), "the optimizer's state")
        if self._rank != to:
            return None
        return merge_optimizer_states([{**own, "state": state} for state in states])

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Mark a saved optimizer state as this rank's shard."""
        others = {id(held) for name, held in self._parameters.items() if name not in self._own}
        return mark_owned(state, optimizer.param_groups, others)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's unrounded parameters, which the optimizer's own state does not contain."""
        return {"sharding": {"masters": {name: master.clone() for name, master in self._masters.items()}}}

    def merge(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge all ranks' unrounded parameters. Each has one owner."""
        masters = {name: own for entry in entries for name, own in entry["sharding"]["masters"].items()}
        return {"sharding": {"masters": masters}}

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Validate a saved state, and return a function that applies it."""
        masters = (state.get("sharding") or {}).get("masters")
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

    def _nothing(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.float32, device=self._device)

    def _gradients(self) -> list[torch.Tensor]:
        return list(self._named_gradients().values())

    def _named_gradients(self) -> dict[str, torch.Tensor]:
        return {name: own.grad for name, own in self._own.items() if own.grad is not None}

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether the step's gradients are finite on all ranks, by a collective if they may differ.

        Raises:
            UnavailableError: This backward has added to gradients that were already exchanged, on some rank.
        """
        if self.config.interleaved:
            return finite
        added, self._added_to = list(self._added_to.values()), {}
        again = torch.stack(added).any() if added else finite.new_zeros(())
        # Only an owner sees the mean of its gradients, so ranks must exchange whether any overflowed. This is
        # the step's one host read: backward is over, and the caller reads the result from the CPU.
        flags = torch.stack([flag.to(self._device, torch.float32) for flag in (finite.logical_not(), again)])
        overflows, additions = self._run(_summed(flags), "the overflow check").tolist()
        if additions:  # on every rank, before any has stepped
            self._drop_gradients()
            raise UnavailableError(_ADDED)
        return torch.tensor(overflows == 0, dtype=torch.bool, device="cpu")

    def _run(self, steps: Collectives[torch.Tensor], label: str) -> torch.Tensor:
        return self._engine.run(steps, step=self.context.steps.count, label=label)

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = _closure_in(args, kwargs)
        if closure is not None and (self.config.interleaved or self.config.parameters):
            raise UnavailableError(
                "step(closure) was called, but with ZeRO(interleaved=True) the step is inside backward, and"
                " with parameters= a forward inside the step would see unrounded parameters: use ZeRO()"
                " without these, or call backward before step()"
            )
        for name, parameter in self._parameters.items():
            if name not in self._own:
                optimizer.state.pop(parameter, None)  # left over from loading a whole state
        self._skips = self._skips_step(optimizer, closure)
        if closure is None:  # before the step, as an optimizer may change gradients itself
            self._changed = self._versions.changed(self._named_gradients())
        if self._lent is not None:
            self._lent.grad = None
            self._lent = None
        if self._skips:
            for parameter in self._own.values():
                parameter.grad = None
        elif not self.config.interleaved:
            self._unround(self._own)

    def _skips_step(self, optimizer: Optimizer, closure: Any) -> bool:
        """Return whether a step is skipped after an overflow, on all ranks, so that none shares parameters.

        Sharing would round parameters that were never shared before. In a closure the backward that may
        overflow comes later. A fused optimizer skips the step by itself if a GradScaler calls it.
        """
        skips = self.context.steps.skipping.skips
        return self._overflowed and skips and closure is None and "found_inf" not in vars(optimizer)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.config.interleaved and not self._skips:
            with at_work():
                self._share_all(args, kwargs)

    def _share_all(self, args: Any, kwargs: Any) -> None:
        """Send all updated parameters to all ranks, and raise if gradients were changed on any rank."""
        if _closure_in(args, kwargs) is not None:
            self._changed = self._versions.changed(self._named_gradients())
        flags = torch.tensor(
            [float(self._changed), float(self.missing is not None)], dtype=torch.float32, device=self._device
        )
        # All-gather: every owner's updated parameters, bucket by bucket, so that packing one overlaps with
        # sending another. The check is the last program of the same engine step.
        with torch.no_grad():
            nothing, count = self._nothing(), self.context.steps.count
            for bucket in self._chunks():
                steps = self._share(Pieces.of(bucket, self.owners))
                self._engine.submit(steps, step=count, label=bucket, last=False, instead=nothing)
            changed, missing = self._run(_summed(flags), "the check of gradients").tolist()
        if self._size > 1 and (changed or missing):  # on every rank, so that none waits for the others
            if missing:
                raise StateError(self.missing or "another rank's optimizer state was loaded there alone")
            raise UnavailableError(_CHANGED)

    def _chunks(self) -> Iterator[Bucket]:
        """Yield the model's parameters in buckets of one dtype, of which only names and shapes are used."""
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

    def _step(self, names: Sequence[str], mean: torch.Tensor, unused: set[str]) -> None:
        """Step some of this rank's own parameters with the user's optimizer."""
        owned = [self._every[name] for name in names]
        gradients = [
            pair
            for name, pair in zip(names, gradients_in(mean, owned, strided=False), strict=True)
            if pair[0].requires_grad and name not in unused
        ]
        if gradients:
            self._unround([name for name in names if name in self._own])
            step_some(self._optimizer, gradients)

    def _unround(self, names: Iterable[str]) -> None:
        """Restore the unrounded values of own parameters before a step."""
        with torch.no_grad():
            for name in names:
                master = self._masters.get(name)
                if master is None:
                    continue
                # Where the parameter still is the rounded master, continue from the master: steps smaller
                # than half of bf16's spacing would otherwise be lost every time.
                rounded = master.to(torch.bfloat16).to(master.dtype)
                own = self._own[name]
                own.copy_(torch.where(own == rounded, master, own))  # others were set by the user since

    def _share(self, pieces: Pieces) -> Collectives[torch.Tensor]:
        """Send own parameters to all ranks, rounded if configured, and copy in those of other owners."""
        # A bucket of torch 2.9 holds complex numbers, one of 2.13 pairs. Parameters are always sent as pairs.
        shapes = tuple(tuple(real_numbers(self._every[name]).shape for name in own) for own in pieces.names)
        pieces = replace(pieces, shapes=shapes)
        names = pieces.names[self._rank]
        every = [name for own in pieces.names for name in own]
        like = self._every[every[0]]
        travel = self.config.parameters or like.dtype
        numbers = [real_numbers(self._every[name]) for name in names]
        if travel != like.dtype and like.is_floating_point():
            for name in names:
                self._masters[name] = self._every[name].detach().clone()
            numbers = [tensor.to(travel) for tensor in numbers]
        kind = travel if like.is_floating_point() else real_numbers(like).dtype
        own = pack(numbers) if numbers else torch.empty(0, dtype=kind, device=like.device)
        shared = yield from pieces.share(own, self._rank)
        # The owner takes the rounded values of its own parameters as well, or replicas would differ.
        for name, tensor in shared.items():
            if self.owners[name] != self._rank or name in self._masters:
                real_numbers(self._every[name]).copy_(tensor)
        return own


def _summed(tensor: torch.Tensor) -> Collectives[torch.Tensor]:
    total: torch.Tensor = yield AllReduce(tensor)
    return total


def _closure_in(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure") or (args[1] if len(args) > 1 else None)
