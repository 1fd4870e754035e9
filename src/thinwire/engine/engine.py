"""The engine, which runs programs and issues their collectives in the static order.

On CPU, backward's own thread takes the turns that do not block, and one wire thread takes those that do, so
backward never waits before its end. On accelerators the same order runs inline, inside the hook, on a side
stream. Collectives there return at once and are ordered by the stream, so the wire thread only enforces the
time limit, and `settle` waits until the device has finished them.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch

from thinwire.engine.comm.communicator import Communicator, world_ranks
from thinwire.engine.futures import Result, at_work
from thinwire.engine.meter import GRADIENTS, Meter, Stats, StepTrace
from thinwire.engine.ops import Collectives
from thinwire.engine.scheduler import Scheduler
from thinwire.engine.streams import SideStream
from thinwire.engine.task import EngineStep, Task
from thinwire.errors import ThinwireError, WireError

_JOIN_SECONDS = 1.0
_CHECK_SECONDS = 5.0
_LAND_FIRST, _LAND_LAST = 0.00005, 0.001
"""Seconds between two looks at an accelerator's collectives at the end of a step, at first and later."""
_WATCH_SECONDS = 0.25
"""Seconds between two looks of the wire thread at them."""
_CPU = torch.device("cpu")


class Engine:
    """A runner of programs, submitted in the order of buckets, that returns futures of their results.

    Programs of one step overlap. `submit(..., last=True)` ends the step. The wire thread starts with the
    first program and ends with `close`.

    Args:
        communicator: Issues the collectives. `close` closes it.
        device: The device of the gradients.
        inline: Whether programs run inside `submit`. None: on accelerators only.
        meter: Records the steps. None makes a new one.
        purpose: The purpose of the steps, as in `StepRecord`.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        device: torch.device = _CPU,
        inline: bool | None = None,
        meter: Meter | None = None,
        purpose: str = GRADIENTS,
    ) -> None:
        self.meter = meter or Meter()
        self._communicator = communicator
        self._purpose = purpose
        self._device = device
        self._inline = device.type != "cpu" if inline is None else inline
        self._side_stream = SideStream(device)
        self._scheduler = Scheduler(communicator, self.meter, self._side_stream)
        self._inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: advance, False: stop
        self._thread: threading.Thread | None = None
        self._end: Callable[[], object] | None = None
        self._open: EngineStep | None = None
        self._ended: EngineStep | None = None
        self._closed = False

    def submit(
        self,
        program: Collectives[torch.Tensor],
        *,
        step: int,
        label: object,
        last: bool,
        instead: torch.Tensor,
    ) -> Result:
        """Start a program.

        If the submitting thread waits for the future before the step's end, all programs submitted so far
        run to their ends before later ones begin. All ranks must then wait at the same point.

        Args:
            program: The generator that yields collectives.
            step: The step's number in the meter, taken from the first program of the step.
            label: The program's name in errors.
            last: Whether it ends the step.
            instead: The future's value if the program fails after `guard` was called for its step. Without
                `guard`, the future raises. On an accelerator the tensor's memory is kept until the program
                ends.

        Returns:
            A future of the program's result.

        Raises:
            WireError: The engine is closed, or an earlier collective failed.
            ProgramError: An earlier program has failed.
        """
        if self._closed:
            raise WireError(f"{label} was submitted to a closed wire: its DDP model is gone")
        self._scheduler.raise_error()
        with at_work():
            current = self._current_step(step)
            future = Result(instead.device, partial(_awaited, weakref.ref(self), current))
            task = Task(program, label, last, current, instead, future, self._side_stream.mark())
            if last:
                self._ended, self._open = current, None
            if self._side_stream.separate:
                self._side_stream.keep(instead)  # the caller may drop it while the program uses it
            self._scheduler.add(task)
            self._move()
        return future

    def run(self, program: Collectives[torch.Tensor], *, step: int, label: object) -> torch.Tensor:
        """Run a program between backward passes, after those already submitted, and wait for all of them.

        Args:
            program: The generator that yields collectives. It ends the open step, or is a step of its own.
            step: The step's number in the meter.
            label: The program's name in errors.

        Returns:
            The program's result.

        Raises:
            WireError: The engine is closed, or a collective failed.
            ProgramError: A program failed.
        """
        instead = torch.zeros(0, dtype=torch.float32, device=self._device)
        with at_work():
            future = self.submit(program, step=step, label=label, last=True, instead=instead)
            # Guarded, a failure is raised here by `settle`, with its type, and not by the future.
            self.guard()
            self.settle()
            result: torch.Tensor = future.wait()
        return result

    def hurry(self, step: EngineStep) -> None:
        """Run the open step's programs so far to their ends before any that are submitted later."""
        if step is self._open and step.thread == threading.get_ident():
            with at_work():
                self._scheduler.barrier(step)
                self._move()

    @property
    def mid_step(self) -> bool:
        """True from the start of a step until its last program is submitted."""
        return self._open is not None

    @property
    def failed(self) -> bool:
        """True once the wire is down."""
        return self._scheduler.error is not None

    @property
    def latest(self) -> EngineStep | None:
        """The step that ended last, or None once it has been settled."""
        return self._ended

    def guard(self, step: EngineStep | None = None) -> None:
        """Declare that `settle` will be called before the results of a step are used.

        Programs of the step that fail then complete their futures with harmless values, and `settle` raises.
        Exposed time is counted from this call on.

        Args:
            step: The step; by default the latest.

        Raises:
            ThinwireError: The first failure so far.
        """
        step = step or self._ended
        if step is not None:
            # DDP waits for futures in C++, and turns an error that one holds into a bare RuntimeError. So
            # futures of a guarded step hold a harmless tensor instead, and `settle`, which is called after
            # DDP's final callback, raises the error itself.
            step.guarded = True
            step.awaited_since = time.perf_counter()
        self.check()

    def settle(self, step: EngineStep | None = None) -> None:
        """Wait until a step is done.

        Args:
            step: A step whose last program was submitted; by default the latest.

        Raises:
            WireError: A collective failed, or the wire thread has died.
            ProgramError: A program failed.
        """
        step = step or self._ended
        with at_work():
            # Every collective has a time limit, so the step ends. Only a thread that has died could hang it.
            while step is not None and not step.done.wait(_CHECK_SECONDS):
                if self._thread is not None and not self._thread.is_alive():
                    raise WireError("the wire thread has died, so this step will not end: restart the job")
            if step is self._ended:
                self._ended = None
            self._land()
        self._side_stream.join()  # the host may read or free the programs' results next
        self.check()

    def _land(self) -> None:
        """Wait until the device has finished all collectives, or the wire is down.

        The host reads a value next, which would block without a limit if a rank is lost.
        """
        pause = _LAND_FIRST
        while self._scheduler.in_flight and not self._scheduler.land():
            time.sleep(pause)
            pause = min(2 * pause, _LAND_LAST)

    def fail(self, error: ThinwireError) -> None:
        """Shut the wire down because ranks have diverged, as a failed program does, and raise the error.

        Args:
            error: The error that a check of a finished step found, the same on every rank.

        Raises:
            ThinwireError: `error`, now and in every later call.
        """
        with self._scheduler.lock:
            self._scheduler.fail(error)
        self.check()

    def check(self) -> None:
        """Raise the first failure so far, if any, without waiting."""
        self._scheduler.raise_error()

    def world_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return ranks of this engine's group as ranks of the world, as errors name them."""
        return world_ranks(self._communicator, ranks)

    def stats(self) -> Stats:
        """Return bytes and times so far."""
        return self.meter.snapshot()

    def close(self) -> None:
        """Stop the thread and close the communicator. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._end is not None:
            self._end()
        else:
            self._scheduler.join(_JOIN_SECONDS)
            self._communicator.close()

    def _move(self) -> None:
        """Take the turns that are due now, and wake the wire thread for the others."""
        # The hand-off between backward's thread (B) and the wire thread (W). B has queued a program, without
        # the lock. If the lock is free, B takes the turns that need no waiting. If W has it, B does not wait:
        # W may be encoding for milliseconds. But W may already have looked at the queue, found it empty, and
        # be about to sleep with the lock still held, so that the program would lie there until the next
        # message arrives. So B puts an entry into the inbox, after it has queued the program. W waits for
        # messages only if the queue is empty after it has released the lock (`has_arrivals`), and otherwise
        # for the inbox, where the entry wakes it.
        if self._scheduler.lock.acquire(blocking=False):
            try:
                with self._side_stream.entered():
                    self._scheduler.advance(wait=self._inline)
            finally:
                self._scheduler.latest_arrival = time.monotonic()  # an inline step may have waited long
                self._scheduler.lock.release()
        self._start_thread()
        self._inbox.put(True)

    def _current_step(self, number: int) -> EngineStep:
        if self._open is None:
            communicator = self._communicator
            trace = StepTrace(number, communicator.rank, communicator.size, self._purpose)
            self._open = EngineStep(trace)
        return self._open

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._scheduler, self._inbox, self._inline), name="thinwire", daemon=True
            )
            self._thread.start()
            # At exit too: a thread that wakes up in C++ while the interpreter shuts down aborts the process.
            self._end = weakref.finalize(self, _end, self._thread, self._inbox, self._scheduler)


def _end(thread: threading.Thread, inbox: "queue.SimpleQueue[bool]", scheduler: Scheduler) -> None:
    """Stop the wire thread and close the communicator."""
    # Before the thread stops, as it closes the communicator, and might not end before the interpreter does.
    scheduler.part()
    inbox.put(False)
    # The garbage collector calls this too, and may be running on the wire thread itself.
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():  # it waits for a collective, whose result this rank will not use
            scheduler.communicator.abort()
            thread.join(_JOIN_SECONDS)
        if thread.is_alive():  # its backend cannot abort; the thread closes the communicator afterwards
            return
    scheduler.join(_JOIN_SECONDS)
    scheduler.communicator.close()


def _awaited(engine: "weakref.ref[Engine]", step: EngineStep) -> None:
    """React to a wait for a future of this step, without keeping the engine alive."""
    if (living := engine()) is not None:
        living.hurry(step)


def _serve(scheduler: Scheduler, inbox: "queue.SimpleQueue[bool]", inline: bool) -> None:
    """Run the wire thread. It refers to the scheduler only, so it keeps neither engine nor model alive."""
    while _receive(scheduler, inbox, inline):
        # Inline, this thread takes no turns, except to fail programs that were queued while it shut the wire
        # down, with the lock that their own thread needs to run them.
        if not inline or scheduler.error is not None:
            # An interrupt of a program here (SystemExit, say) has failed the scheduler: backward raises it.
            with scheduler.lock, contextlib.suppress(BaseException):
                scheduler.advance(wait=False)
    scheduler.communicator.close()


def _receive(scheduler: Scheduler, inbox: "queue.SimpleQueue[bool]", inline: bool) -> bool:
    """Wait until a turn may be due, without the scheduler's lock, and fail a step that exceeds the limit.

    It waits for the oldest collective in flight, or for the inbox if there is none. (A completion callback
    would avoid the wait, but it would run Python on the backend's threads. These abort the process if they
    complete while the interpreter shuts down.)

    Returns:
        True to advance; False to stop the thread.
    """
    # What is in flight may be a future that only a program still in the queue completes.
    if not inline and (scheduler.has_arrivals or scheduler.await_oldest()):
        return _nothing_stops(inbox)
    if scheduler.in_flight:
        # `settle` looks at them more often. This is for a host that blocks elsewhere, as in a read of the
        # loss: it waits for the same collectives, and aborting them is what wakes it.
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=_WATCH_SECONDS)
        scheduler.land()
        return True
    if scheduler.mid_step:
        limit = scheduler.communicator.limit.total_seconds()
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=limit)
        with scheduler.lock:
            if scheduler.mid_step and time.monotonic() - scheduler.latest_arrival >= limit:
                scheduler.fail(
                    WireError(
                        f"the step's last bucket did not arrive within {limit:g} s. Either backward was"
                        " interrupted. Or a hook of yours passes only some buckets to thinwire: pass all of"
                        " them. Or it waits for futures with torch.futures.wait_all or collect_all: call"
                        " future.wait(), or better return future.then(...)"
                    )
                )
        return True
    return inbox.get()


def _nothing_stops(inbox: "queue.SimpleQueue[bool]") -> bool:
    """Empty the inbox; return whether the thread may continue."""
    with contextlib.suppress(queue.Empty):
        while inbox.get_nowait():
            continue
        return False
    return True
