"""The reducer, which takes DDP's buckets and returns futures of averaged gradients.

A reducer belongs to one DDP model but does not keep it alive. Its thread and process group end with
the model.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import UnavailableError, WireError
from thinwire.models.ddp.internals import in_backward, reduced_parameters
from thinwire.models.ddp.model import Model, parameters_of
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Program, Programs
from thinwire.programs.sparse_gradients import require_sparse
from thinwire.step.buckets import BucketRunner
from thinwire.step.connection import Connection
from thinwire.step.layout import laid_out
from thinwire.step.transaction import StepTransaction


class PlainEvents:
    """The step events of torch-named hooks. Means are equal on all ranks, and every backward is a step."""

    counts_backwards = True

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return `finite`, which is equal on all ranks."""
        return finite

    def end_backward(self, committed: bool) -> None:
        """Do nothing."""


class Reducer(BucketRunner):
    """A runner of programs over the buckets that DDP passes to its hook.

    The constructor is collective. Ranks compare set-ups, then make thinwire's process group.

    Args:
        ddp: The model.
        group: The ranks to average over.
        connection: How to connect to them.
        resumes: Whether the layout of buckets is part of a saved state.

    Raises:
        MismatchError: Set-ups differ between ranks.
        WireError: A rank did not take part in time.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: dist.ProcessGroup,
        connection: Connection,
        *,
        resumes: bool = False,
    ) -> None:
        self.model = Model(ddp)
        self.names = {id(parameter): name for name, parameter in parameters_of(ddp).items()}
        self.communicator, self.engine = connection.open(group, self.model.device)
        super().__init__(StepTransaction(self.engine, self.model, connection.scales, PlainEvents()))
        self.steps.scales.watch(ddp, self.names.keys())
        self._resumes = resumes
        self._buckets = _Sequence(ddp)
        self.model.on_gone(self.engine.close)

    def run(
        self,
        programs: Programs,
        grad_bucket: dist.GradBucket,
        memory: Memory,
        undo: Callable[[], None] | None = None,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Start the programs of a bucket.

        Args:
            programs: The programs of all parameters in this step.
            grad_bucket: The bucket that DDP passed to its hook.
            memory: The tensors that programs keep between steps.
            undo: Called if the step is rolled back.

        Returns:
            A future of the tensor that DDP writes to the gradients.

        Raises:
            UnavailableError: The bucket comes from compiled autograd, or its gradient is sparse and the
                program averages dense ones.
            WireError: The backward before this one was interrupted, or a collective failed.
        """
        index, last = self._buckets.take(grad_bucket, self.steps)
        self._open()
        if undo is not None:
            self.steps.undo_with(undo)
        bucket = self._describe(grad_bucket, index)
        if bucket.buffer.is_sparse:  # of a torch-named hook: attach accepts dense gradients only
            require_sparse(programs.program, bucket)
        small = not programs.sliced or bucket.buffer.nbytes < (programs.program.preferred_bytes or math.inf)
        whole = self.layout.held is None and self.layout.again is None and not programs.exceptions
        if small and whole and _in_order(programs.program, grad_bucket.parameters()):
            future = self.steps.submit(programs.program, bucket, memory, last)
            self.layout.latest.append(bucket.names)
        else:
            views = laid_out(bucket, grad_bucket.parameters())
            future = self._run_parts(programs, bucket, views, memory, last)
        if last:
            self._close()
        return future

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return `finite`, which is equal on all ranks."""
        return finite

    def settled(self, committed: bool) -> None:
        """Determine the groups of the next step, if they are part of the saved state."""
        if self._resumes and self.model.alive:
            if not committed:
                self.layout.repeat()
            self.layout.foresee(self.model.ddp(), self.names)

    def _describe(self, bucket: dist.GradBucket, index: int) -> Bucket:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        return Bucket(
            index=index,
            buffer=buffer,
            names=tuple(self.names[id(parameter)] for parameter in parameters),
            shapes=tuple(_shape_in(buffer, one) if one.is_complex() else one.shape for one in parameters),
            rank=self.communicator.rank,
            world_size=self.communicator.size,
            step=self.steps.count,
        )


class _Sequence:
    """The numbers of a step's buckets, in ascending order, with the last one marked.

    In the first backward under static_graph, DDP passes all buckets at the end, numbers each of them 0 and
    marks none as the last. This class counts them then.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._latest = -1
        self._taken = 0
        self._all = _reduced_count(ddp)
        self._delayed = ddp.static_graph
        """Whether the next backward is the first under static_graph."""

    def take(self, bucket: dist.GradBucket, steps: StepTransaction) -> tuple[int, bool]:
        """Return a bucket's number, and whether it is the step's last.

        Raises:
            UnavailableError: The bucket comes from compiled autograd.
            WireError: The backward before this one was interrupted.
        """
        if not isinstance(bucket, dist.GradBucket):
            check_bucket(bucket)
        size = len(bucket.parameters())
        index, last = bucket.index(), bucket.is_last()
        if self._delayed and self._taken + size <= self._all:
            index, last = self._latest + 1, last or self._taken + size == self._all
        if index <= self._latest:
            raise WireError(
                f"bucket {index} arrived while step {steps.count} was not finished: its backward was"
                f" interrupted after bucket {self._latest}, so ranks may have diverged; resume from a"
                " checkpoint"
            )
        self._latest = -1 if last else index
        self._taken = 0 if last else self._taken + size
        self._delayed = self._delayed and not last
        return index, last


def _reduced_count(ddp: DistributedDataParallel) -> int:
    """Return the number of parameters in DDP's buckets, which trained when DDP was constructed.

    Inside a hook DDP holds the lock that listing its buckets takes. There it returns the number of parameters
    that train now.
    """
    if ddp.static_graph and not in_backward():
        return len(reduced_parameters(ddp))
    return sum(one.requires_grad for one in parameters_of(ddp).values())


def _in_order(program: Program, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a program can work on DDP's own layout of these parameters."""
    return program.ignores_order or all(parameter.is_contiguous() for parameter in parameters)


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


def _shape_in(buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Size:
    """Return a gradient's shape in DDP's buffer, where complex numbers are pairs of real ones."""
    pairs = parameter.is_complex() and not buffer.is_complex()
    return torch.Size((*parameter.shape, 2)) if pairs else parameter.shape
