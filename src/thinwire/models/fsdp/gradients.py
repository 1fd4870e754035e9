"""The gradients of an FSDP2 model, averaged shard by shard with the same shards of other replicas.

The order of events in a backward pass, for every group of parameters that FSDP reduces at once:

    reduce-scatter            FSDP averages the gradients within this replica, each rank keeps its shard
    all-reduce hook           `_before`: gradients of earlier backward passes are put aside
    FSDP                      divides, casts, and writes the shard's gradients
    post-accumulate hooks     `_after`: all are written, and their exchange with the other replicas starts
    end of backward           the means are in place, and gradients that were put aside are added

Hooks are public. So are divide factors and dtypes: gradients are taken after FSDP has applied both.
"""

import json
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from thinwire.engine.comm.agreement import SetUp, agree_on
from thinwire.engine.pack import local_part, pack, unpack
from thinwire.errors import ThinwireError, UnavailableError, WireError
from thinwire.models.fsdp import internals
from thinwire.models.fsdp.model import ShardedModel, refuse_hooks
from thinwire.models.fsdp.shards import Shards
from thinwire.models.fsdp.watch import watch
from thinwire.programs.finite import all_true
from thinwire.programs.finite import finite as is_finite
from thinwire.programs.parameter_names import first_names
from thinwire.step.autograd import queue_callback
from thinwire.step.runner import AttachedRun


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
        return any(parameter.requires_grad for parameter in self.parameters.values())

    def begin(self) -> None:
        """Expect the gradients of all parameters that train now."""
        self.missing = {name for name, parameter in self.parameters.items() if parameter.requires_grad}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the gradients by name, without those that have no numbers here."""
        held = {name: tensor.grad for name, tensor in self.parameters.items() if tensor.requires_grad}
        found = {name: local_part(gradient) for name, gradient in held.items() if gradient is not None}
        return {name: gradient for name, gradient in found.items() if gradient.numel()}


class ShardedGradients(ShardedModel):
    """A sharded model whose gradients are averaged with those of the same shards in other replicas.

    Args:
        module: The root module.
        group: The ranks that hold the same shard in the other replicas, this one among them.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(module, group)
        self._shards = Shards(self.shard_group, self.device)
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
        self._sent: list[tuple[dict[str, torch.Tensor], torch.futures.Future[torch.Tensor]]] = []
        self._trained = self._which_train()

    def connect_shards(self, set_up: SetUp, limit: timedelta | None) -> None:
        """Compare a set-up with the other shards of this replica, and connect to them. Collective."""
        self._shards.open(set_up, limit)
        self.on_gone(self._shards.close)

    def register(self, run: AttachedRun) -> None:
        """Set FSDP's hooks, and watch for failures of other ranks."""
        meetings = [run.communicator.rendezvous, self._shards.rendezvous]
        self.on_gone(watch(run.engine, meetings, self.shard_group))
        self.on_forward(run.engine.check)
        self.on_gone(self._groups.clear)
        names = {id(parameter): name for name, parameter in self.parameters().items()}
        for module in internals.sharded_modules(self.module("attach")):
            for held in internals.parameter_groups(module):
                own = {names[id(parameter)]: parameter for parameter in internals.parameters_of(held)}
                group = self._groups[len(self._groups)] = Group(len(self._groups), own)
                # Replicas may reach modules in different orders. The first replica's first backward decides
                # for all.
                self._order.insert(0, group.number)  # backward reaches the last module first
                module.set_all_reduce_hook(partial(self._before, run, group))

    def _before(self, run: AttachedRun, group: Group, reduced: torch.Tensor) -> None:
        """Put gradients of earlier backward passes aside, so that FSDP writes this one's alone."""
        if not self._begun:
            self.check_finalization()
            self._check_trained(run)
            # An interrupted backward may have left groups here, which belong to no step any more.
            self._begun, self._arrived, self._earlier, self._sent = True, {}, {}, []
            self._left = [number for number in self._order if self._groups[number].trains]
            queue_callback(partial(self._check_complete, run))
        run.engine.check()
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
                parameter.register_post_accumulate_grad_hook(partial(self._after, run, group, name))
                group.hooked.add(name)
            if parameter.grad is not None:
                self._earlier[name], parameter.grad = parameter.grad, None

    def _check_trained(self, run: AttachedRun) -> None:
        """Compare which parameters train with the other replicas, if some were frozen or unfrozen here.

        Replicas that disagree would send gradients of different sizes, at which Gloo ends the process. A
        replica without a change does not come here: it waits for this one's gradients. So this one waits a
        little shorter, and the other's error can name the reason.
        """
        trained, earlier = self._which_train(), self._trained
        if trained == earlier:
            return
        self._trained = trained
        set_up = {f"parameter {name}": "trained" if on else "frozen" for name, on in trained.items()}
        communicator = run.communicator
        limit = communicator.limit - 2 * communicator.report_limit
        try:
            agree_on(set_up, communicator.rendezvous, limit, "a change of frozen parameters")
        except ThinwireError as error:
            reason = str(error)
        else:
            return
        changed = first_names([name for name, on in trained.items() if on != earlier[name]])
        self._fail(
            run,
            WireError(
                f"{changed} changed between frozen and trained on this rank, and not in all replicas: freeze"
                f" and unfreeze parameters on every rank, before the same step ({reason})"
            ),
        )

    def _fail(self, run: AttachedRun, error: ThinwireError) -> None:
        """Shut the wire down on all ranks of this replica and of the others, and raise the error."""
        self._shards.fail(error)
        run.engine.fail(error)

    def _after(self, run: AttachedRun, group: Group, name: str, parameter: torch.Tensor) -> None:
        """Start the exchange of a group when the last of its gradients is written, in the common order."""
        group.missing.discard(name)
        if group.missing or group.number in self._arrived:
            return
        self._arrived[group.number] = group
        # Autograd may reach the groups of branches in another order in another replica. If each replica
        # exchanged gradients as they arrive, one's first bucket would meet another's second.
        while self._left and self._left[0] in self._arrived:
            ready = self._arrived[self._left.pop(0)]
            gradients = ready.gradients()
            means = run.bucket_ready(
                _flat(list(gradients.values()), self.device),
                tuple(gradients),
                tuple(gradient.shape for gradient in gradients.values()),
                index=len(self._sent),
                last=not self._left,
            )
            self._sent.append((gradients, means))

    def agree_finite(self, finite: torch.Tensor, step: int, overflowed: bool) -> torch.Tensor:
        """Return whether means are finite on all ranks of this replica. Collective.

        After an overflow, so are gradients of earlier backward passes, to which the means will be added. DDP
        exchanges those too, so there the mean itself is non-finite.
        """
        if overflowed:
            earlier = [local_part(gradient) for gradient in self._earlier.values()]
            finite = all_true([finite, *(is_finite(part).to(finite.device) for part in earlier)])
        return self._shards.all_true(finite, step)

    @torch.no_grad()
    def write_means(self, run: AttachedRun, committed: bool) -> None:
        """Write the means to the gradients, and add those of earlier backward passes."""
        for gradients, future in self._sent:
            shapes = [gradient.shape for gradient in gradients.values()]
            if gradients:
                for own, mean in zip(gradients.values(), unpack(future.wait(), shapes), strict=True):
                    if own.data_ptr() != mean.data_ptr():
                        own.copy_(mean)
        parameters = self.parameters()
        for name, earlier in self._earlier.items():
            parameter = parameters[name]
            if parameter.grad is not None:
                local_part(earlier).add_(local_part(parameter.grad))
            parameter.grad = earlier
        self._sent, self._earlier = [], {}
        if not committed:
            self.spoil_gradients()  # again, as the means have replaced the NaNs
        if not self._ordered:
            self._take_order(run)

    def report(self, error: ThinwireError) -> None:
        """Report a failure to the other shards of this replica, which would wait for this one."""
        self._shards.fail(error)

    def _take_order(self, run: AttachedRun) -> None:
        """Take the order in which the first replica's gradients arrived for all later steps. Collective."""
        rest = [number for number in self._order if number not in self._arrived]
        own = json.dumps([*self._arrived, *rest])
        texts = run.communicator.rendezvous.gather("order", own, run.communicator.limit)
        self._order, self._ordered = json.loads(texts[0]), True

    def _check_complete(self, run: AttachedRun) -> None:
        """Fail if FSDP has left out a group's gradients, when backward is over."""
        self._begun = False
        left = [self._groups[number] for number in self._left if number not in self._arrived]
        if not left:
            return
        waited = [name for group in left for name in group.missing or group.parameters]
        # Not zeros: weight decay and momentum would act where FSDP leaves a parameter alone.
        self._fail(
            run,
            WireError(
                f"FSDP wrote no gradients of {first_names(waited)} in this backward, and other replicas may"
                " wait for them: if some are unused, call model.set_reduce_scatter_unused_params(True), or"
                " freeze them; for micro-batches, call model.set_requires_gradient_sync(False) on the root"
                " module"
            ),
        )

    def _which_train(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self.parameters().items()}


def _flat(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return tensors as one flat tensor: their own memory if there is no gap, such as padding, or a copy."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device=device)
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != end or tensor.dtype != first.dtype:
            return pack(tensors)
        end += tensor.nbytes
    if first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return pack(tensors)
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
