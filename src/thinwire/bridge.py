"""Between DDP and the engine: DDP's buckets in, averaged gradients out.

A bridge belongs to one DDP model but does not keep it alive: when the model goes, its thread and process
group go with it.
"""

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import UnavailableError, WireError
from thinwire.grouping import Grouping, Home, bring_home, together
from thinwire.programs.memory import Memory, Staged
from thinwire.programs.overflow import is_finite
from thinwire.programs.program import NO_EXCEPTIONS, Bucket, Outcome, Program, by_program, outcome_of
from thinwire.scalers import Scales
from thinwire.set_ups import agree_on
from thinwire.wire.communicator import Communicator
from thinwire.wire.engine import Engine
from thinwire.wire.meter import Meter
from thinwire.wire.ops import Steps

logger = logging.getLogger("thinwire")


class _OpenStep:
    """A backward pass that has begun to exchange gradients, and whether it counts is not known yet."""

    def __init__(self, scale: float | None) -> None:
        self.finite = True
        self.closed = False
        self.undo: list[Callable[[], None]] = []
        self.homes: dict[str, Home] = {}
        self._scale = scale
        self._memories: dict[int, Staged] = {}

    def memory(self, memory: Memory) -> Staged:
        """As this step sees it."""
        if id(memory) not in self._memories:
            memory.rescale(self._scale)
            self._memories[id(memory)] = memory.staged()
        return self._memories[id(memory)]

    def observe(self, steps: Steps[Outcome]) -> Steps[torch.Tensor]:
        """A program's mean; the step notes whether it is finite."""
        outcome = yield from steps
        self.finite = self.finite and is_finite(outcome)
        return outcome.mean

    def commit(self, but_of: set[str]) -> None:
        for memory in self._memories.values():
            memory.commit(but_of)

    def forget(self) -> None:
        for memory in self._memories.values():
            memory.forget()
        for undo in self.undo:
            undo()


class Bridge:
    """Runs programs over the buckets that DDP hands to its hook.

    Making one is collective: the ranks compare set-ups first, then make thinwire's process group.

    A step counts as a whole or not at all. Where a mean is not finite, the same on every rank, all gradients
    become NaN, so that whoever looks at any of them hears of it; and what was remembered, and counted, is as
    before.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: dist.ProcessGroup,
        set_up: dict[str, str],
        *,
        limit: timedelta | None = None,
        meter: Meter | None = None,
        resumes: bool = False,
        scales: Scales | None = None,
    ) -> None:
        parameters = parameters_of(ddp)
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.communicator = Communicator(group, limit)
        agree_on(set_up, self.communicator.meeting, self.communicator.limit)
        self.communicator.open()
        device = next(iter(parameters.values())).device
        self.engine = Engine(self.communicator, device=device, meter=meter)
        self.memories: dict[int, Memory] = {}
        """Of torch-named hooks, by the identity of their states."""
        self.settled: Callable[[bool], None] = lambda counted: None
        """Told at the end of every step whether it counted."""
        self.overflowed = False
        """Whether the latest step did not count."""
        self.agree: Callable[[bool], bool] | None = None
        """Asks all ranks whether means are finite, where each rank sees only some of them."""
        self.grouping = Grouping()
        self._resumes = resumes
        self.scales = scales or Scales()
        self._ddp = weakref.ref(ddp)
        self._latest = -1
        self._taken = 0
        self._delays = ddp.static_graph
        """Whether the backward to come is the first under static_graph."""
        self._all = sum(one.requires_grad for one in parameters.values())
        self._open: _OpenStep | None = None
        self._ddp_talks_last = ddp.find_unused_parameters
        weakref.finalize(ddp, self.engine.close)

    def run(
        self,
        program: Program,
        grad_bucket: dist.GradBucket,
        memory: Memory,
        exceptions: Mapping[str, Program] = NO_EXCEPTIONS,
        undo: Callable[[], None] | None = None,
    ) -> "torch.futures.Future[torch.Tensor]":
        """Start the program on a bucket; the future holds what DDP shall write to the gradients.

        Parameters among `exceptions` go by a program of their own. If the step turns out not to count, `undo`
        is called.

        A rank that has run out of inputs (Join) has no backward at whose end a callback could settle the
        step: it waits here, so that what the others do at that point, it does too.
        """
        check_bucket(grad_bucket)
        index, last = self.place(grad_bucket)
        bucket = self._describe(grad_bucket, index)
        self._check_sequence(bucket, last)
        step = self._begin() if self._open is None else self._open
        if undo is not None:
            step.undo.append(undo)
        future = self._start(step, program, bucket, last, step.memory(memory), exceptions)
        if last:
            step.closed = True
            self.grouping.end()
            if in_backward():
                Variable._execution_engine.queue_callback(self._before_ddp_finishes)
            else:
                self.settle()
        return future

    def _begin(self) -> _OpenStep:
        self._open = _OpenStep(self.scales.now(self.overflowed))
        return self._open

    def _start(
        self,
        step: _OpenStep,
        program: Program,
        bucket: Bucket,
        last: bool,
        memory: Memory,
        exceptions: Mapping[str, Program],
    ) -> "torch.futures.Future[torch.Tensor]":
        groups = self.grouping.complete(bucket.names, last)
        chosen = [pair for group in groups for pair in by_program(group, program, exceptions)]
        if len(chosen) == 1 and chosen[0][1] == bucket.names and not step.homes:
            return self._submit(step, chosen[0][0], bucket, last, memory)
        home = Home(bucket)
        step.homes.update(dict.fromkeys(bucket.names, home))
        for number, (one, names) in enumerate(chosen, 1):
            part = together(names, step.homes, bucket, bucket.index)
            future = self._submit(step, one, part, last and number == len(chosen), memory)
            bring_home(part, step.homes, future)
        return home.future

    def _submit(
        self, step: _OpenStep, program: Program, bucket: Bucket, last: bool, memory: Memory
    ) -> "torch.futures.Future[torch.Tensor]":
        steps = step.observe(outcome_of(program, bucket, memory))
        return self.engine.submit(steps, label=bucket, last=last, instead=bucket.buffer)

    def settle(self) -> None:
        """Wait for the latest step, and let it count, or not; raise what went wrong."""
        step, self._open = self._open, None
        try:
            self.engine.settle()
        except BaseException:
            if step is not None:
                step.forget()
            raise
        if step is None or not step.closed:
            return
        finite = step.finite if self.agree is None else self.agree(step.finite)
        self.overflowed = not finite
        ddp = self._ddp()
        if self._resumes and ddp is not None:
            if not finite:
                self.grouping.repeat()
            self.grouping.foresee(ddp, self.names)
        parameters = {} if ddp is None else parameters_of(ddp)
        if finite:
            step.commit(_left_out(ddp, parameters))
            self.settled(True)
            return
        logger.info("step %d overflowed on some rank: it is skipped on all", self.engine.step - 1)
        step.forget()
        self.engine.step -= 1
        self.engine.meter.overflowed()
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.fill_(math.nan)
        self.settled(False)

    def place(self, bucket: dist.GradBucket) -> tuple[int, bool]:
        """The number of a bucket that has just come, and whether it is the step's last.

        In the first backward under static_graph, DDP hands all buckets over at the end, and calls each of
        them number 0 and none the last.
        """
        taken = self._taken + len(bucket.parameters())
        if self._delays and taken <= self._all:
            return self._latest + 1, bucket.is_last() or taken == self._all
        return bucket.index(), bucket.is_last()

    def _check_sequence(self, bucket: Bucket, last: bool) -> None:
        """DDP hands over a step's buckets in rising order; one that falls back begins another step."""
        if bucket.index <= self._latest:
            raise WireError(
                f"{bucket} came while step {self.engine.step} was not finished: its backward was interrupted"
                f" after bucket {self._latest}, so ranks may have parted ways; resume from a checkpoint"
            )
        self._latest = -1 if last else bucket.index
        self._taken = 0 if last else self._taken + len(bucket.names)
        self._delays = self._delays and not last

    def _before_ddp_finishes(self) -> None:
        """Runs ahead of DDP's own final callback, in which it waits and copies bucket after bucket.

        What went wrong is raised after that one: DDP would lose the exception's type. But where DDP itself
        has a collective to wait for there, which parameters were used, it is raised before: that one fails
        too, and names nobody.
        """
        self.engine.guard()
        if self._ddp_talks_last:
            self.engine.settle()
        Variable._execution_engine.queue_callback(self.settle)

    def _describe(self, bucket: dist.GradBucket, index: int) -> Bucket:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        return Bucket(
            index=index,
            buffer=buffer,
            names=tuple(self.names[id(parameter)] for parameter in parameters),
            shapes=tuple(_shape_in(buffer, parameter) for parameter in parameters),
            rank=self.communicator.rank,
            world_size=self.communicator.size,
            step=self.engine.step,
        )


def _left_out(ddp: DistributedDataParallel | None, parameters: Mapping[str, torch.nn.Parameter]) -> set[str]:
    """Parameters that no rank used: DDP drops their means, so their residuals are still owed."""
    if ddp is None or not (ddp.find_unused_parameters or ddp.static_graph):
        return set()
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    used = ddp.reducer._get_local_used_map().tolist()  # which DDP has summed over all ranks by now
    if len(used) == len(trained):
        return {name for name, count in zip(trained, used, strict=True) if not count}
    return {name for name, parameter in parameters.items() if parameter.grad is None}


def in_backward() -> bool:
    """Whether autograd is running: ranks that have run out of inputs (Join) call hooks without it."""
    return torch._C._current_graph_task_id() != -1


def check_bucket(bucket: object) -> None:
    """Refuse what compiled autograd hands to hooks."""
    if not isinstance(bucket, dist.GradBucket):
        raise UnavailableError(
            f"the hook was called with a {type(bucket).__name__}: compiled autograd's Python reducer has no"
            " buckets; set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'"
        )


def _shape_in(buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Size:
    """DDP lays complex gradients out as pairs of real numbers."""
    pairs = parameter.is_complex() and not buffer.is_complex()
    return torch.Size((*parameter.shape, 2)) if pairs else parameter.shape


def parameters_of(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP keeps equal, by their names in the wrapped model.

    Frozen ones too: they may have been frozen after DDP was made, which goes on averaging their gradients.
    """
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    }
