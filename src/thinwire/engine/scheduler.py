"""The scheduler, which advances programs in the static order, on any thread."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.engine.comm.communicator import (
    CAUSE,
    Communicator,
    NotConnectedError,
    report,
    unresponsive,
    world_ranks,
)
from thinwire.engine.comm.pending import Pending
from thinwire.engine.futures import at_work
from thinwire.engine.meter import Meter
from thinwire.engine.ops import Await, Collective
from thinwire.engine.profiling import span, stage_name
from thinwire.engine.streams import SideStream
from thinwire.engine.task import EngineStep, Task, anew
from thinwire.errors import ProgramError, ThinwireError, WireError

_ASK_SECONDS = 2.0
"""How often a rank that waits for an accelerator's collective asks the store for failures of others."""


class _LostError(Exception):
    """A collective that failed because a peer, or the network, is gone."""

    def __init__(self, what: str, ranks: tuple[int, ...] | None, waited: float, reason: str) -> None:
        super().__init__(reason)
        self.what, self.ranks, self.waited = what, ranks, waited


@dataclass
class _Flight:
    """A collective on an accelerator, from its issue until the device has finished it.

    Attributes:
        pending: The collective. It keeps what the collective received, until then.
        what: The collective and its place, for errors.
        ranks: The ranks that take part. None: all.
        ready: The event after which its input is computed.
    """

    pending: Pending
    what: str
    ranks: tuple[int, ...] | None
    ready: Any | None
    since: float | None = None

    def waited(self) -> float:
        """Return for how long the network has had it. The device's own work before it does not count."""
        if self.since is None:
            # The host issues a whole step within milliseconds. The device may compute for longer than the
            # limit before the first collective can begin.
            if self.ready is None or self.ready.query():
                self.since = time.monotonic()
            return 0.0
        return time.monotonic() - self.since


class Scheduler:
    """The tasks of an engine, advanced by any thread. Failures are kept in `error`, not raised.

    Only one thread at a time may call `advance`, and must hold `lock`.

    After a failure, ranks may have diverged, so the wire stays down. All programs in flight, and all later
    ones, get the same error.
    """

    def __init__(self, communicator: Communicator, meter: Meter, side_stream: SideStream) -> None:
        self.communicator = communicator
        self.lock = threading.Lock()
        self.error: ThinwireError | None = None
        self.latest_arrival = 0.0
        self._meter = meter
        self._side_stream = side_stream
        self._device_type = side_stream.device.type
        self._arriving: collections.deque[Task | EngineStep] = collections.deque()
        self._step: EngineStep | None = None
        self._stages: dict[int, int] = {}
        """The number of collectives of each bucket in its latest step, for the names of ranges."""
        self._hanging_up: threading.Thread | None = None
        self._flights: collections.deque[_Flight] = collections.deque()
        self._landing = threading.Lock()
        """Held to change `_flights` and `_losing`. It is taken last: who has it takes no other lock."""
        self._losing = False
        """Whether a thread has found that a collective in flight is lost, and shuts the wire down."""
        self._flown = False
        """Whether any collective ran on an accelerator."""
        self._asked = 0.0
        """When the store was last asked whether another rank has failed."""

    def raise_error(self) -> None:
        """Raise the failure that shut the wire down, if any.

        Each call raises a new copy, and only the first has the cause. An exception refers to its frames, and
        these refer to the model, so keeping one would keep the model alive.
        """
        if self.error is not None:
            cause, self.error.__cause__ = self.error.__cause__, None
            raise anew(self.error) from cause

    @property
    def mid_step(self) -> bool:
        """True while a step is running."""
        return self._step is not None

    def add(self, task: Task) -> None:
        """Queue a program. The lock is not needed."""
        self.latest_arrival = time.monotonic()
        self._arriving.append(task)

    def barrier(self, step: EngineStep) -> None:
        """Run a step's queued programs to their ends before later ones. The lock is not needed."""
        self._arriving.append(step)

    def advance(self, *, wait: bool) -> None:
        """Take turns as far as the order allows. Without `wait`, stop before a turn that would block."""
        interrupt: BaseException | None = None
        lost: _LostError | None = None
        # Timing decides which thread this is. Programs must not see its modes, or their numbers would depend
        # on timing too.
        with at_work(), torch.no_grad(), _without_autocast(self._device_type):
            while (step := self._admit()) is not None:
                stuck, failure = False, self.error
                if failure is None:
                    try:
                        stuck = self._take_turns(step, wait)
                    except ThinwireError as error:
                        failure = error
                    except _LostError as error:
                        lost = error
                    except BaseException as error:  # Ctrl-C in backward's thread, or a defect of thinwire
                        interrupt = error
                        failure = WireError(f"interrupted by {type(error).__name__}: {error}")
                # Failures are handled outside of the except blocks. An exception that is raised inside one
                # refers to the one being handled, and through its frames to the model.
                if lost is not None:
                    failure, lost = self._explain(lost, step), None
                if failure is not None:
                    self.fail(failure)
                elif step.agenda.finished:
                    self._finish(step)
                elif stuck or not self._arriving:
                    return
        if interrupt is not None:
            raise interrupt

    def _admit(self) -> EngineStep | None:
        """Admit the queued programs of the running step, or begin the next step; return the step, if any."""
        if self._step is None and self._arriving:
            self._step = self._arriving[0].step
        while self._arriving and self._arriving[0].step is self._step:
            task = self._arriving.popleft()
            if isinstance(task, EngineStep):
                task.agenda.barrier()
                continue
            task.step.tasks.append(task)
            task.step.agenda.arrive()
            if task.last:
                task.step.agenda.close()
        return self._step

    @property
    def has_arrivals(self) -> bool:
        """True if a queued program could be admitted now. The lock is not needed.

        Another thread may have queued it, and found the lock taken, just before `advance` returned here.
        """
        queued = next(iter(tuple(self._arriving)), None)
        return queued is not None and (self._step is None or queued.step is self._step)

    def await_oldest(self) -> bool:
        """Wait for the collective that has been in flight the longest, and record its end.

        It is the one that the next turn needs, since turns are taken in the order in which their collectives
        were issued. The lock is not needed, so that backward's thread can take turns meanwhile.

        Returns:
            False if none is in flight.
        """
        # Another thread may end the step meanwhile. Its tasks and their records are only read here, and a
        # collective that has ended already is not waited for.
        step = self._step
        flying = [
            (task.record, task.pending)
            for task in (tuple(step.tasks) if step else ())
            if task.record is not None and task.pending is not None and task.record.ended is None
        ]
        if not flying:
            return False
        record, pending = min(flying, key=lambda flight: flight[0].issued)
        pending.complete()
        if record.ended is None:
            record.ended = time.perf_counter()
        return True

    @property
    def in_flight(self) -> bool:
        """True while the device has not finished all collectives, as far as `land` has seen."""
        return bool(self._flights) or self._losing

    def land(self) -> bool:
        """Forget the collectives that the device has finished, and fail the wire at the time limit.

        On an accelerator no call of torch fails if a rank is lost: `Work.wait` returns at once, and the first
        read of a value blocks the host until the backend ends the process. So the host looks here before it
        reads one. Any thread may call this, without the scheduler's lock.

        Returns:
            True if none is in flight, or the wire is down. False: call again.
        """
        with self._landing:
            # Aborted collectives look as if they had ended. The wire thread (W) finds one lost, aborts all,
            # and waits for the reports of other ranks. Meanwhile the host (H), which an abort wakes, comes
            # here. If it forgot them as ended, it would go on with whatever is in their tensors. So once W
            # has decided, H waits for the error.
            if self._losing or self.error is not None:
                return self.error is not None
            # A communicator's collectives end in the order of their issue. Those of subgroups may end before
            # an older one; they are forgotten with it.
            latest = None
            while self._flights and self._flights[0].pending.landed():
                latest = self._flights.popleft()
            flight = self._flights[0] if self._flights else None
            waited = 0.0 if flight is None else flight.waited()
            # A backend may have aborted them by itself, as NCCL does after an error of the network if
            # TORCH_NCCL_ASYNC_ERROR_HANDLING=2 keeps it from ending the process.
            reason = None if latest is None else self.communicator.failure()
            if reason is not None:
                flight, self._losing = latest, True
        if flight is None:
            return True
        if reason is None:
            reason = self._lost(waited)
            if reason is None:
                return False
            with self._landing:
                if (
                    self._losing or flight.pending.landed()
                ):  # another thread was faster, or it ended after all
                    return False
                self._losing = True
        with self.lock:
            if self.error is None:
                self.fail(self._explain(_LostError(flight.what, flight.ranks, waited, reason), self._step))
        return True

    def part(self) -> None:
        """Wait a moment for other ranks before the wire ends, unless it is down or a step is in flight."""
        if self._flown and self.error is None and not self.in_flight:
            self.communicator.part()

    def _lost(self, waited: float) -> str | None:
        """Return why a collective of this age is lost, or None if it may still end."""
        communicator = self.communicator
        limit = (communicator.limit - communicator.report_limit).total_seconds()
        if waited >= limit:
            return f"it did not end on the device within {limit:g} s"
        # A rank whose program failed aborts its own communicator, which NCCL's other ranks do not notice. So
        # they look into the store now and then, and need not wait until the limit.
        now = time.monotonic()
        if waited < _ASK_SECONDS or now - self._asked < _ASK_SECONDS or communicator.rendezvous is None:
            return None
        self._asked = now
        try:
            return "another rank has failed" if communicator.rendezvous.reported() else None
        except WireError as error:
            return str(error)

    def fail(self, error: ThinwireError) -> None:
        """Fail every program of the step, report the error to the other ranks, and close connections."""
        # In this order: the cause is in the store before any peer can notice the failure. Then futures are
        # completed, so that backward stops waiting, and last the connections are closed, by which peers fail.
        first, self.error = self.error is None, error.with_traceback(None)
        error.__context__ = None
        step, self._step = self._step, None
        if first:
            report(self.communicator, f"{CAUSE}{error}")
        for task in step.tasks if step else ():
            task.fail(error)
        if step:
            step.end()
        with self._landing:
            self._flights.clear()
            self._losing = False
        self._hang_up()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for the process group to close after a failure."""
        if self._hanging_up is not None:
            self._hanging_up.join(seconds)

    def _take_turns(self, step: EngineStep, wait: bool) -> bool:
        """Take the step's turns as far as possible; return whether a collective in flight stopped it."""
        if self._side_stream.separate:
            # One stream runs all programs, in the order of these calls. Behind the newest bucket's first turn
            # the others would wait on the device until backward has computed that bucket's gradients.
            for bucket, stage in step.agenda.later_stages():
                task = step.tasks[bucket]
                if task.stage == stage and task.held is None and task.program is not None:
                    self._resume(task, bucket)
        while True:
            stuck = False
            while not stuck and (turn := step.agenda.next()) is not None:
                bucket, stage = turn
                task = step.tasks[bucket]
                # A program that took its turn early is at a later stage, or holds this stage's collective.
                if task.stage == stage and task.held is None and task.program is not None:
                    if not wait and task.pending is not None and not task.pending.done():
                        step.agenda.again(bucket, stage)
                        stuck = True
                        continue
                    self._resume(task, bucket)
                if task.stage == stage and task.held is not None:
                    self._issue(task, bucket, task.held)
                if task.program is not None:
                    step.agenda.again(bucket, stage + 1)
            if not self._take_early_turns(step):
                return stuck

    def _take_early_turns(self, step: EngineStep) -> bool:
        """Take turns before their place in the static order, where program and communicator allow it.

        Returns:
            Whether there were any. Turns of the static order may then be due.
        """
        taken = False
        for bucket, task in enumerate(step.tasks):
            while task.early and task.held is None and task.pending is not None and task.pending.done():
                taken = True
                self._resume(task, bucket)
                # A collective that ranks match by order is held until its turn.
                if task.held is not None and task.early:
                    self._issue(task, bucket, task.held)
        return taken

    def _wait(self, task: Task) -> Any:
        """Wait for the task's last collective and return its result."""
        assert task.pending is not None
        assert task.record is not None
        received, reason = None, None
        try:
            with span("wait"):
                received = task.pending.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        if task.record.ended is None:
            task.record.ended = time.perf_counter()
        if reason is not None:  # raised outside the except block, so that no traceback keeps the collective
            raise _lost_by(task, task.record.stage, task.record.ended - task.record.issued, reason)
        return received

    def _resume(self, task: Task, bucket: int) -> None:
        """Resume the program with the result of its collective, and keep its next collective, if any."""
        assert task.program is not None
        # Backward has queued the kernels that write the gradients. A first turn must not read them before.
        # Later turns need no wait: it would delay them until backward has computed gradients of later
        # buckets, which they do not read.
        self._side_stream.after(task.ready)
        task.ready = None
        received = None if task.pending is None else self._wait(task)
        started = time.perf_counter()
        try:
            with span(stage_name(task.stage, self._stages.get(bucket))):
                task.held = task.program.send(received)
        except StopIteration as stop:
            self._stages[bucket] = task.stage
            task.resolve(stop.value)
        except ThinwireError:
            raise
        except Exception as error:
            raise ProgramError(
                f"the program failed on {task.label}, after {task.stage} collectives:"
                f" {type(error).__name__}: {error}"
            ) from error
        finally:
            task.step.trace.encode_seconds += time.perf_counter() - started
        op = task.held
        task.early = isinstance(op, Collective) and not op.in_order and self.communicator.in_any_order(op)

    def _issue(self, task: Task, bucket: int, op: Collective | Await) -> None:
        started, task.op, lost = time.perf_counter(), op, None
        turn = (bucket, task.stage) if task.early else None
        ready = self._side_stream.mark()
        try:
            with span("issue"):
                pending = self.communicator.issue(op, turn)
        except NotConnectedError as error:
            lost = str(error).partition("\n")[0]
        except RuntimeError as error:
            if isinstance(error, ThinwireError):
                raise
            raise ProgramError(f"the backend rejected {op}, for {task.label}: {error}") from error
        if lost is not None:
            raise _lost_by(task, task.stage, time.perf_counter() - started, lost)
        if isinstance(op, Collective) and op.tensor.device.type != "cpu":
            with self._landing:
                self._flown = True
                self._flights.append(_Flight(pending, _what(task, task.stage), op.ranks, ready))
        task.record = task.step.trace.issued(bucket, task.stage, op)
        task.pending, task.held = pending, None
        task.stage += 1

    def _finish(self, step: EngineStep) -> None:
        now = time.perf_counter()
        exposed = now - step.awaited_since if step.awaited_since is not None else 0.0
        self._meter.add(step.trace.finish(exposed, timed=self._device_type == "cpu"))
        self._step = None
        step.end()

    def _explain(self, lost: _LostError, step: EngineStep | None) -> WireError:
        """Return the error for a failed collective, naming the ranks that may have caused it."""
        (own,) = world_ranks(self.communicator, [self.communicator.rank])
        report(self.communicator, f"waited for {lost.what}")
        for other in step.tasks if step else ():
            other.pending = None  # a pending receive would keep its connection open, and peers waiting
        self._hang_up()
        return WireError(
            f"rank {own} waited {lost.waited:.1f} s for {lost.what}, and it"
            f" failed. {unresponsive(self.communicator, lost.ranks)} The job cannot continue: restart it from"
            f" its last checkpoint. (Backend error: {lost})"
        )

    def _hang_up(self) -> None:
        """Close the connections, so that ranks that still wait for this one fail at once.

        It runs on its own thread, since some backends close only after collectives in flight have ended.
        """
        if self._hanging_up is None:
            self._hanging_up = threading.Thread(
                target=_hang_up, args=(self.communicator,), name="thinwire hanging up", daemon=True
            )
            self._hanging_up.start()


def _what(task: Task, stage: int) -> str:
    """Return a task's latest collective and its place, for errors."""
    return f"{task.op} at step {task.step.trace.step}, {task.label}, stage {stage}"


def _lost_by(task: Task, stage: int, waited: float, reason: str) -> _LostError:
    return _LostError(_what(task, stage), getattr(task.op, "ranks", None), waited, reason)


def _hang_up(communicator: Communicator) -> None:
    communicator.abort()
    communicator.close()


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    """Switch autocast off on this thread alone.

    `torch.autocast(enabled=False)` does not work here. Leaving its outermost block clears the weight cache of
    the whole process, and on the wire thread every block is the outermost. A forward on another thread would
    then cast a weight twice.
    """
    enabled = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)
