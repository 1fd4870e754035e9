"""The reducer of FSDP2 models, which averages each shard's gradients with the same shard of other replicas.

The order of events in a backward pass, for every group of parameters that FSDP reduces at once:

    reduce-scatter            FSDP averages the gradients within this replica, each rank keeps its shard
    all-reduce hook           `_before`: gradients of earlier backward passes are put aside
    FSDP                      divides, casts, and writes the shard's gradients
    post-accumulate hooks     `_after`: all are written, and their exchange with the other replicas starts
    end of backward           the means are in place, and gradients that were put aside are added

Hooks are public. So are divide factors and dtypes: gradients are taken after FSDP has applied both.
"""

import json
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from thinwire.engine.comm.agreement import SetUp, agree_on
from thinwire.engine.pack import local_part, pack, unpack
from thinwire.errors import ThinwireError, UnavailableError, WireError
from thinwire.models.ddp.internals import queue_callback
from thinwire.models.ddp.reducer import PlainEvents
from thinwire.models.fsdp import internals
from thinwire.models.fsdp.model import ShardedModel, refuse_hooks
from thinwire.models.fsdp.shards import Shards, ShardSteps
from thinwire.models.fsdp.watch import watch
from thinwire.programs.allreduce import Alone
from thinwire.programs.finite import all_true
from thinwire.programs.finite import finite as is_finite
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Programs
from thinwire.step.buckets import BucketRunner
from thinwire.step.connection import Connection


class Group:
    """Parameters that FSDP reduces at once, and the state of their gradients in this backward."""

    def __init__(self, number: int, parameters: dict[str, nn.Parameter]) -> None:
        self.number = number
        self.parameters = parameters
        self.hooked: set[str] = set()
        """Parameters with thinwire's hook. A frozen one accepts no hook, and gets it when it trains."""
        self.missing: set[str] = set()
        """Trained parameters whose gradient FSDP has not written yet."""

    @property
    def trains(self) -> bool:
        """True if at least one parameter is not frozen."""
        return any(one.requires_grad for one in self.parameters.values())

    def begin(self) -> None:
        """Expect the gradients of all parameters that train now."""
        self.missing = {name for name, one in self.parameters.items() if one.requires_grad}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the gradients by name, without those that have no numbers here."""
        held = {name: one.grad for name, one in self.parameters.items() if one.requires_grad}
        found = {name: local_part(one) for name, one in held.items() if one is not None}
        return {name: one for name, one in found.items() if one.numel()}


class ShardReducer(BucketRunner):
    """A runner of programs over the groups of parameters that FSDP hands to its hooks.

    The constructor is collective: ranks compare set-ups with other replicas and other shards, then make
    thinwire's process groups.

    Args:
        model: The model's handle.
        connection: How to connect to the same shard of the other replicas.
        common: What must be equal for all shards too.

    Raises:
        MismatchError: Set-ups differ between ranks.
        WireError: A rank did not take part in time.
    """

    def __init__(self, model: ShardedModel, connection: Connection, common: SetUp) -> None:
        self.model = model
        self._shards = Shards(
            model.shard_group, Connection(set_up=common, limit=connection.limit), model.device
        )
        self.communicator, self.engine = connection.open(model.group, model.device, self._shards.open)
        steps = ShardSteps(self.engine, model, connection.scales, PlainEvents())
        steps.shards = self._shards
        super().__init__(steps)
        steps.scales.watch(model.module("attach"), {id(one) for one in model.parameters().values()})
        self._groups: dict[int, Group] = {}
        self._order: list[int] = []
        """The groups' numbers in the order of their exchanges, equal in all replicas."""
        self._ordered = False
        self._left: list[int] = []
        """The groups of this backward that wait for their gradients, or for those of a group before them."""
        self._begun = False
        self._arrived: dict[int, Group] = {}
        self._earlier: dict[str, torch.Tensor] = {}
        """Gradients of earlier backward passes, to which this one's means are added."""
        self._sent: list[tuple[Bucket, dict[str, torch.Tensor], torch.futures.Future[torch.Tensor]]] = []
        self._run_group: Callable[[Group], None] | None = None
        self._trained = _trained(model)
        model.on_gone(self.engine.close)
        model.on_gone(self._shards.close)
        assert self._shards.rendezvous is not None, "connection.open() has opened it"
        meetings = [self.communicator.rendezvous, self._shards.rendezvous]
        model.on_gone(watch(self.engine, meetings, model.shard_group))
        model.on_forward(self.engine.check)
        model.on_gone(self._groups.clear)

    def register(self, run_group: Callable[[Group], None]) -> None:
        """Set FSDP's hooks. `run_group` is called when a group's exchange may start, and calls `run`."""
        self._run_group = run_group
        names = {id(one): name for name, one in self.model.parameters().items()}
        for module in internals.sharded_modules(self.model.module("attach")):
            for held in internals.parameter_groups(module):
                own = {names[id(one)]: one for one in internals.parameters_of(held)}
                group = self._groups[len(self._groups)] = Group(len(self._groups), own)
                self._order.insert(0, group.number)  # backward reaches the last module first
                module.set_all_reduce_hook(partial(self._before, group))

    def _before(self, group: Group, reduced: torch.Tensor) -> None:
        """Put gradients of earlier backward passes aside, so that FSDP writes this one's alone."""
        if not self._begun:
            self.model.check_finalization()
            self._check_trained()
            self._begun, self._arrived, self._earlier, self._sent = True, {}, {}, []
            self._left = [number for number in self._order if self._groups[number].trains]
            queue_callback(self._check_complete)
        self.engine.check()
        if group.number in self._arrived:
            raise UnavailableError(
                f"FSDP reduced the gradients of {', '.join(list(group.parameters)[:3])} twice in a backward:"
                " their module runs more than once in a forward; call fully_shard on a module around all of"
                " its uses instead"
            )
        group.begin()
        for name in group.missing:
            parameter = group.parameters[name]
            refuse_hooks(name, parameter, own=name in group.hooked)
            if name not in group.hooked:
                parameter.register_post_accumulate_grad_hook(partial(self._after, group, name))
                group.hooked.add(name)
            if parameter.grad is not None:
                self._earlier[name], parameter.grad = parameter.grad, None

    def _check_trained(self) -> None:
        """Compare which parameters train with the other replicas, if some were frozen or unfrozen here.

        Replicas that disagree would send gradients of different sizes, at which Gloo ends the process. A
        replica without a change does not come here: it waits for this one's gradients. So this one waits a
        little shorter, and the other's error can name the reason.
        """
        trained, earlier = _trained(self.model), self._trained
        if trained == earlier:
            return
        self._trained = trained
        set_up = {f"parameter {name}": "trained" if on else "frozen" for name, on in trained.items()}
        limit = self.communicator.limit - 2 * self.communicator.report_limit
        try:
            agree_on(set_up, self.communicator.rendezvous, limit, "a change of frozen parameters")
        except ThinwireError as error:
            reason = str(error)
        else:
            return
        changed = _shown([name for name, on in trained.items() if on != earlier[name]])
        self._fail(
            WireError(
                f"{changed} changed between frozen and trained on this rank, and not in all replicas: freeze"
                f" and unfreeze parameters on every rank, before the same step ({reason})"
            )
        )

    def _fail(self, error: ThinwireError) -> None:
        """Shut the wire down on all ranks of this replica and of the others, and raise the error."""
        self._shards.fail(error)
        self.engine.fail(error)

    def _after(self, group: Group, name: str, parameter: torch.Tensor) -> None:
        """Start the exchange of a group when the last of its gradients is there, in the common order."""
        group.missing.discard(name)
        if group.missing or group.number in self._arrived:
            return
        self._arrived[group.number] = group
        while self._left and self._left[0] in self._arrived:
            ready = self._arrived[self._left.pop(0)]
            assert self._run_group is not None, "hooks are set by register()"
            self._run_group(ready)

    def run(self, programs: Programs, group: Group, memory: Memory) -> None:
        """Start the programs of a group.

        Args:
            programs: The programs of all parameters in this step.
            group: The group, whose gradients FSDP has written.
            memory: The tensors that programs keep between steps.
        """
        self._open()
        last = not self._left
        gradients = group.gradients()
        bucket = self._describe(gradients)
        if gradients or self._deferred:
            future = self._run_parts(programs, bucket, bucket.views(), memory, last)
            self._sent.append((bucket, gradients, future))
        elif last:
            self.steps.submit(Alone(), bucket, memory, True)
        if last:
            self._close()

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether means are finite on all ranks of this replica. Collective.

        After an overflow, so are gradients of earlier backward passes, to which the means will be added. DDP
        exchanges those too, so there the mean itself is non-finite.
        """
        if self.steps.overflowed:
            earlier = [local_part(one) for one in self._earlier.values()]
            finite = all_true([finite, *(is_finite(one).to(finite.device) for one in earlier)])
        return self._shards.all_true(finite, self.steps.count)

    @torch.no_grad()
    def settled(self, committed: bool) -> None:
        """Write the means to the gradients, and add those of earlier backward passes."""
        for bucket, gradients, future in self._sent:
            if gradients:
                for own, mean in zip(gradients.values(), unpack(future.wait(), bucket.shapes), strict=True):
                    if own.data_ptr() != mean.data_ptr():
                        own.copy_(mean)
        parameters = self.model.parameters()
        for name, earlier in self._earlier.items():
            parameter = parameters[name]
            if parameter.grad is not None:
                local_part(earlier).add_(local_part(parameter.grad))
            parameter.grad = earlier
        self._sent, self._earlier = [], {}
        if not committed:
            self.model.spoil_gradients()
        if not self._ordered:
            self._take_order()

    def _take_order(self) -> None:
        """Take the order in which the first replica's gradients arrived for all later steps. Collective."""
        rest = [number for number in self._order if number not in self._arrived]
        own = json.dumps([*self._arrived, *rest])
        texts = self.communicator.rendezvous.gather("order", own, self.communicator.limit)
        self._order, self._ordered = json.loads(texts[0]), True

    def _check_complete(self) -> None:
        """Fail if FSDP has left out a group's gradients, when backward is over."""
        self._begun = False
        left = [self._groups[number] for number in self._left if number not in self._arrived]
        if not left:
            return
        waited = [name for group in left for name in group.missing or group.parameters]
        self._fail(
            WireError(
                f"FSDP wrote no gradients of {_shown(waited)} in this backward, and other replicas may"
                " wait for them: if some are unused, call model.set_reduce_scatter_unused_params(True), or"
                " freeze them; for micro-batches, call model.set_requires_gradient_sync(False) on the root"
                " module"
            )
        )

    def _describe(self, gradients: dict[str, torch.Tensor]) -> Bucket:
        """Return a group's gradients as a bucket, in FSDP's own memory where they follow each other there."""
        return Bucket(
            index=len(self._sent),
            buffer=_flat(list(gradients.values()), self.model.device),
            names=tuple(gradients),
            shapes=tuple(one.shape for one in gradients.values()),
            rank=self.communicator.rank,
            world_size=self.communicator.size,
            step=self.steps.count,
        )


def _shown(names: list[str]) -> str:
    """Return the first of some names as text."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _trained(model: ShardedModel) -> dict[str, bool]:
    """Return whether each parameter trains now, by name."""
    return {name: one.requires_grad for name, one in model.parameters().items()}


def _flat(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return tensors as one flat tensor: their own memory if there is no gap, such as padding, or a copy."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device=device)
    first, end = tensors[0], tensors[0].data_ptr()
    for one in tensors:
        if not one.is_contiguous() or one.data_ptr() != end or one.dtype != first.dtype:
            return pack(tensors)
        end += one.nbytes
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return pack(tensors)
    return first.as_strided((sum(one.numel() for one in tensors),), (1,))
