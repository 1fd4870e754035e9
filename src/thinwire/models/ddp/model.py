"""A DistributedDataParallel model: named tensors, a process group, and the hook that takes its buckets."""

# DDP inspects a hook's annotations and rejects strings, so no `from __future__ import annotations` here.

import math
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.comm.agreement import SetUp
from thinwire.engine.ops import AllReduce
from thinwire.errors import AttachError, ThinwireError, UnavailableError, WireError
from thinwire.models.ddp import internals
from thinwire.programs.parameter_names import original_name
from thinwire.step.autograd import in_backward
from thinwire.step.runner import AttachedRun, Choice
from thinwire.step.strategy import needs_ddp


def thinwire_hook(
    run: AttachedRun, bucket: dist.GradBucket, choice: Choice | None = None
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket. The only hook that `attach` registers; torch-named hooks call it with a choice.

    Args:
        run: The run of the model.
        bucket: The bucket that DDP passes.
        choice: The programs of a torch-named hook. None takes the strategy's.

    Returns:
        A future of the tensor that DDP writes to the gradients.

    Raises:
        UnavailableError: The bucket comes from compiled autograd.
        WireError: The backward before this one was interrupted, or a collective failed.
    """
    model = run.model
    assert isinstance(model, DDPModel), "DDP calls this hook"
    if not isinstance(bucket, dist.GradBucket):
        check_bucket(bucket)
    parameters, buffer, names = bucket.parameters(), bucket.buffer(), model.names
    index, last = model.sequence.take(bucket.index(), bucket.is_last(), len(parameters), run.steps.count)
    return run.bucket_ready(
        buffer,
        tuple([names[id(parameter)] for parameter in parameters]),
        # DDP's buffer holds complex numbers as pairs of real ones.
        tuple(
            [
                torch.Size((*each.shape, 2)) if each.is_complex() and not buffer.is_complex() else each.shape
                for each in parameters
            ]
        ),
        index=index,
        last=last,
        strided_as=parameters,
        choice=choice,
    )


class DDPModel:
    """A weak handle to a DDP model. It does not keep the model alive.

    Args:
        ddp: The model.
        group: The ranks to average over. None is the model's own group.
    """

    reduces_gradients = True
    shard_key: str | None = None

    def __init__(self, ddp: DistributedDataParallel, group: dist.ProcessGroup | None = None) -> None:
        self._ddp = weakref.ref(ddp)
        parameters = parameters_of(ddp)
        self.group: dist.ProcessGroup = ddp.process_group if group is None else group
        self.device = next(iter(parameters.values())).device
        self.static_graph: bool = ddp.static_graph
        self.find_unused_parameters: bool = ddp.find_unused_parameters
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.sequence = _Sequence(ddp)
        self._reduced: list[str] | None = None
        """The names of DDP's own list of parameters, computed when first needed."""
        self._foresees = False
        """Whether DDP's final buckets are laid out early, because the wire's saved state contains them."""

    def ddp(self, what: str = "this call") -> DistributedDataParallel:
        """Return the DDP model; raise AttachError, naming the call `what`, if it is gone."""
        ddp = self._ddp()
        if ddp is None:
            raise AttachError(f"{what} was called on a wire whose DDP model is gone: attach to a new one")
        return ddp

    def module(self, what: str = "this call") -> torch.nn.Module:
        """Return the user's module inside the DDP model; raise AttachError if it is gone."""
        return internals.wrapped_module(self.ddp(what))

    @property
    def joins(self) -> bool:
        """True inside torch's Join context, where ranks may run out of inputs."""
        return internals.joins(self.ddp())

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by name; an empty dict if the model is gone."""
        ddp = self._ddp()
        return {} if ddp is None else parameters_of(ddp)

    def unreduced(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that DDP does not average, because they were frozen when it was made."""
        ddp, parameters = self.ddp(), self.parameters()
        trained = sum(parameter.requires_grad for parameter in parameters.values())
        if trained == len(parameters) == internals.reduced_count(ddp):
            return {}
        members = internals.reduced_parameters(ddp)
        return {name: tensor for name, tensor in parameters.items() if id(tensor) not in members}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name. Every rank holds all of each parameter."""
        return dict(self.parameters())

    def shapes(self) -> dict[str, torch.Size]:
        """Return the parameters' shapes by name."""
        return {name: parameter.shape for name, parameter in self.parameters().items()}

    @property
    def bucket_bytes(self) -> int:
        """The size of DDP's buckets, except for the first."""
        return internals.bucket_bytes(self.ddp("bucket_bytes"))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name, without those that DDP ignores."""
        ddp = self.ddp("an average")
        ignored = internals.ignored_names(ddp)
        return {
            original_name(name): buffer
            for name, buffer in internals.wrapped_module(ddp).named_buffers()
            if name not in ignored
        }

    def local_state(self, with_buffers: bool = False) -> set[str]:
        """Return the names of state_dict entries that DDP does not keep equal on all ranks.

        These are buffers that DDP does not broadcast, parameters and buffers that it ignores, and extra
        state of modules. Names are original ones.

        Args:
            with_buffers: Whether buffers are kept equal, or saved elsewhere, although DDP does not broadcast.
        """
        shared: dict[str, torch.Tensor] = dict(self.parameters())
        if with_buffers or self.broadcasts_buffers:
            shared |= self.buffers()
        tensors = {id(tensor) for tensor in shared.values()}  # one tensor may have several names
        module = internals.wrapped_module(self.ddp("save_checkpoint"))
        state = module.state_dict(keep_vars=True)
        names = {original_name(name): value for name, value in state.items()}
        return {name for name, value in names.items() if name not in shared and id(value) not in tensors}

    @property
    def broadcasts_buffers(self) -> bool:
        """True if DDP broadcasts rank 0's buffers with every forward."""
        return bool(self.ddp().broadcast_buffers)

    @broadcasts_buffers.setter
    def broadcasts_buffers(self, on: bool) -> None:
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = on

    def on_forward(self, hook: Callable[[], None]) -> Any:
        """Call `hook` at the start of every forward with gradients enabled; return a handle to remove it."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(module: object, inputs: object) -> None:
            if torch.is_grad_enabled():
                hook()

        return internals.called_module(self.ddp()).register_forward_pre_hook(forward)

    def on_gone(self, action: Callable[..., Any], *args: Any) -> Any:
        """Call `action` when the model is collected. It must not refer to the model."""
        return weakref.finalize(self.ddp(), action, *args)

    def use_counts(self) -> torch.Tensor | None:
        """Return how many ranks used each parameter of DDP's list, or None if DDP applies all means."""
        ddp = self._ddp()
        if ddp is None or not (self.find_unused_parameters or self.static_graph):
            return None
        # DDP has summed these over all ranks in its final callback, so they are equal everywhere.
        return internals.use_counts(ddp)

    def unused(self, counts: Sequence[int]) -> set[str]:
        """Return the names of parameters that no rank used, whose means DDP drops."""
        if self._reduced is None:
            ddp = self.ddp()
            members = internals.reduced_parameters(ddp)
            self._reduced = [name for name, tensor in parameters_of(ddp).items() if id(tensor) in members]
        return {name for name, count in zip(self._reduced, counts, strict=True) if not count}

    def check_finalization(self) -> None:
        """Raise UnavailableError if the user's code ends the backward instead of DDP (torch 2.15 and newer).

        A step is settled in backward, after DDP's final callback has written the gradients. With manual
        finalization they are written later. An overflowed step could then not be skipped as a whole, because
        its gradients would replace the NaNs.
        """
        ddp = self._ddp()
        if ddp is not None and internals.finalizes_manually(ddp):
            raise UnavailableError(
                "require_manual_backward_finalization=True: thinwire settles each step inside backward, and"
                " ddp.finalize_backward() would write gradients after that; set"
                " ddp.require_manual_backward_finalization = False"
            )

    def ddp_bytes(self) -> int:
        """Return the bytes that this rank would send in one step with plain DDP, which sums all gradients."""
        total = sum(each.nbytes for each in self.parameters().values() if each.requires_grad)
        gradients = torch.empty(total, dtype=torch.uint8, device="meta")
        return AllReduce(gradients).bytes_sent(0, self.group.size())

    def spoil_gradients(self) -> None:
        """Set all gradients to NaN, so that a GradScaler detects the overflow on every rank."""
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(math.nan) if parameter.grad.is_sparse else parameter.grad.fill_(math.nan)

    def check_hooks(self) -> None:
        """Raise if DDP has another communication hook, or calls none with buckets."""
        ddp = self.ddp("attach")
        if internals.uses_python_reducer(ddp):
            raise_python_reducer("torch._dynamo.config.optimize_ddp was 'python_reducer' when DDP was made")
        for hook in internals.comm_hooks(ddp):
            if hook is thinwire_hook:
                raise AttachError("this model has a wire already: use wire.swap(program) to change it")
            raise AttachError(
                f"this model has the communication hook {hook.__qualname__!r} already, and DDP"
                " accepts only one: wrap the module in a new DistributedDataParallel"
            )

    def connect_shards(self, set_up: SetUp, limit: timedelta | None) -> None:
        """Do nothing: every rank has the whole model."""

    def register(self, run: AttachedRun) -> None:
        """Register `thinwire_hook`, which DDP calls with each bucket."""
        self._foresees = True
        try:
            self.ddp("attach").register_comm_hook(run, thinwire_hook)
        except RuntimeError as error:
            raise AttachError(f"DDP did not accept the hook: {error}") from error

    def agree_finite(self, finite: torch.Tensor, step: int, overflowed: bool) -> torch.Tensor:
        """Return `finite`: all ranks have the same means."""
        return finite

    def write_means(self, run: AttachedRun, committed: bool) -> None:
        """Lay out DDP's final buckets after its first backward, instead of in the next forward.

        DDP itself has written the means. A state that is saved between both would lack the final groups. The
        call is collective, so it does nothing inside Join, where a rank without inputs rebuilds its buckets
        at another point, in the forward that Join runs for it.
        """
        ddp, layout = self._ddp(), run.layout
        if not self._foresees or ddp is None:
            return
        # DDP rebuilds its buckets after its very first backward, also after a bad one. The step that replaces
        # it keeps its groups, so that its means are those of a run without the bad step.
        if not committed:
            layout.repeat()
        if layout.held is not None or internals.has_rebuilt_buckets(ddp) or internals.joins(ddp):
            return
        buckets = internals.rebuild_buckets(ddp)
        if buckets is not None:
            layout.foresee(
                tuple(tuple(self.names[id(held)] for held in bucket.parameters()) for bucket in buckets)
            )

    def report(self, error: ThinwireError) -> None:
        """Do nothing: all ranks of the model are on the wire, which reports its failures."""


class _Sequence:
    """The numbers of a step's buckets, in ascending order, with the last one marked.

    In the first backward under static_graph, DDP passes all buckets at the end, numbers each of them 0 and
    marks none as the last. This class counts them then.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._latest = -1
        self._taken = 0
        self._all = _reduced_count(ddp)
        self._delayed: bool = ddp.static_graph
        """Whether the next backward is the first under static_graph."""

    def take(self, index: int, last: bool, size: int, step: int) -> tuple[int, bool]:
        """Return a bucket's number, and whether it is the step's last.

        Args:
            index: DDP's number of the bucket.
            last: Whether DDP marks it as the last.
            size: The number of its parameters.
            step: The number of the step, for the error.

        Raises:
            WireError: The backward before this one was interrupted.
        """
        # Without a mark on the last bucket, no rank would close its step, and all would wait until the limit.
        if self._delayed and self._taken + size <= self._all:
            index, last = self._latest + 1, last or self._taken + size == self._all
        # A backward that was interrupted between two buckets leaves its step open. Its buckets were exchanged
        # on this rank, and perhaps not on others, so this one cannot simply begin again.
        if index <= self._latest:
            raise WireError(
                f"bucket {index} arrived while step {step} was not finished: its backward was"
                f" interrupted after bucket {self._latest}, so ranks may have diverged; resume from a"
                " checkpoint"
            )
        self._latest = -1 if last else index
        self._taken = 0 if last else self._taken + size
        self._delayed = self._delayed and not last
        return index, last


def _reduced_count(ddp: DistributedDataParallel) -> int:
    """Return the number of parameters in DDP's buckets, which trained when DDP was constructed.

    Inside a hook, where torch-named hooks make a handle, DDP holds the lock that listing its buckets takes.
    There it returns the number of parameters that train now.
    """
    if ddp.static_graph and not in_backward():
        return len(internals.reduced_parameters(ddp))
    return sum(parameter.requires_grad for parameter in parameters_of(ddp).values())


def require_ddp(model: object, what: object) -> DDPModel:
    """Return the handle of a DDP model; raise OptionError, naming the option `what`, for other models."""
    if isinstance(model, DDPModel):
        return model
    raise needs_ddp(what)


def check_bucket(bucket: object) -> None:
    """Raise UnavailableError if a hook was called by compiled autograd's Python reducer."""
    if not isinstance(bucket, dist.GradBucket):
        raise_python_reducer(f"the hook was called with a {type(bucket).__name__}")


def raise_python_reducer(what: str) -> None:
    """Raise UnavailableError, with the ways to avoid the Python reducer."""
    raise UnavailableError(
        f"{what}: compiled autograd's Python reducer has no buckets; set torch._dynamo.config.optimize_ddp ="
        " 'ddp_optimizer' before the model is wrapped, or register allreduce_hook, fp16_compress_hook or"
        " bf16_compress_hook of thinwire.ddp_comm_hooks"
    )


def parameters_of(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that DDP keeps equal, by their names in the wrapped module.

    Frozen ones are included. They may have been frozen after DDP was made, and DDP still averages their
    gradients.
    """
    ignored = internals.ignored_names(ddp)
    # `replicate` may leave out some of the module's parameters.
    own = {id(parameter) for parameter in ddp.module.parameters()}
    return {
        original_name(name): parameter
        for name, parameter in internals.wrapped_module(ddp).named_parameters()
        if internals.lookup_name(name) not in ignored and id(parameter) in own
    }
