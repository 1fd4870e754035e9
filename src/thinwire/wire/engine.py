"""Runs programs so that their collectives reach the wire in the static order.

On CPU the thread of backward takes the turns that need no waiting, and one wire thread those that do, so
backward never waits before its end. On accelerators the same order runs inline, inside the hook, on a side
stream: collectives there return at once and are ordered by the stream, so no thread is needed. (This
project's CI has no accelerator: the inline path is tested on CPU, without the streams.)
"""

import contextlib
import queue
import threading
import time
from typing import Any

import torch

from thinwire.errors import WireError
from thinwire.wire.communicator import Communicator
from thinwire.wire.meter import GRADIENTS, Meter, Stats, StepTrace
from thinwire.wire.ops import Steps
from thinwire.wire.track import Run, Step, Track

_FIRST_POLL, _LAST_POLL = 0.001, 0.016
_JOIN_SECONDS = 1.0
_LOOK_SECONDS = 5.0
_CPU = torch.device("cpu")


class Engine:
    """Takes programs in the order of the buckets, returns futures of their results.

    Programs of one step overlap; `submit(..., last=True)` ends the step. The thread starts with the first
    program and ends with `close`.
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
        self.step = 0
        """The number of steps whose last program was submitted."""
        self.meter = meter or Meter()
        self._communicator = communicator
        self._purpose = purpose
        self._inline = device.type != "cpu" if inline is None else inline
        self._device = device
        self._side_stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
        self._track = Track(communicator, self.meter, device.type)
        self._inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: look again, False: stop
        self._thread: threading.Thread | None = None
        self._open: Step | None = None
        self._ended: Step | None = None
        self._closed = False

    def submit(
        self, program: Steps[torch.Tensor], *, label: object, last: bool, instead: torch.Tensor
    ) -> "torch.futures.Future[Any]":
        """Start a program; `label` names it in errors, `last` ends the step.

        If it fails, its future raises; but where `guard` was called for the step it holds `instead`.
        """
        if self._closed:
            raise WireError(f"{label} was submitted to a closed wire: its DDP model is gone")
        self._track.raise_error()
        run = Run(program, label, last, self._current_step(), instead)
        if last:
            self._ended, self._open = run.step, None
            self.step += 1
        self._track.add(run)
        self._push()
        if not self._inline:
            self._start_thread()
            self._inbox.put(True)
        return run.future

    @property
    def mid_step(self) -> bool:
        """Whether a step was begun whose last program has not been submitted."""
        return self._open is not None

    @property
    def latest(self) -> Step | None:
        """The step that was ended last, unless it has been settled."""
        return self._ended

    def guard(self, step: Step | None = None) -> None:
        """Promise to call `settle` before anybody uses the results of a step, by default the latest.

        Backward has done its own work: from here on, the wire is waited for. Raises what went wrong so far.
        """
        step = step or self._ended
        if step is not None:
            step.guarded = True
            step.awaited_since = time.perf_counter()
        self.check()

    def settle(self, step: Step | None = None) -> None:
        """Wait until a step that was ended, by default the latest, is done; raise what went wrong."""
        step = step or self._ended
        if step is not None:
            while not step.done.wait(_LOOK_SECONDS):
                if self._thread is not None and not self._thread.is_alive():
                    raise WireError("the wire thread has died, so this step will not end: restart the job")
            if step is self._ended:
                self._ended = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong so far, without waiting."""
        self._track.raise_error()

    def stats(self) -> Stats:
        """What has been sent so far."""
        return self.meter.snapshot()

    def close(self) -> None:
        """Stop the thread and leave the process group; may be called more than once."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(False)
        thread = self._thread
        # The garbage collector calls this too, and may be running on the wire thread itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
            if thread.is_alive():  # inside a collective; it will leave the group when that ends
                return
        self._track.join(_JOIN_SECONDS)
        self._communicator.close()

    def _push(self) -> None:
        """Move the track from this thread, unless the wire thread is at it."""
        if self._track.lock.acquire(blocking=False):
            try:
                with self._beside_backward():
                    self._track.advance(wait=self._inline)
            finally:
                self._track.lock.release()

    def _current_step(self) -> Step:
        if self._open is None:
            communicator = self._communicator
            trace = StepTrace(self.step, communicator.rank, communicator.size, self._purpose)
            self._open = Step(trace)
        return self._open

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._track, self._inbox), name="thinwire", daemon=True
            )
            self._thread.start()

    @contextlib.contextmanager
    def _beside_backward(self) -> Any:
        """On an accelerator, order what follows after the gradients, on a stream of its own."""
        if self._side_stream is None:
            yield
            return
        streams = torch.get_device_module(self._device)
        self._side_stream.wait_stream(streams.current_stream(self._device))
        with streams.stream(self._side_stream):
            yield


def _serve(track: Track, inbox: "queue.SimpleQueue[bool]") -> None:
    """The wire thread: it knows the track, never the engine or the model, so it keeps neither alive."""
    while _receive(track, inbox):
        # What interrupts a program here (SystemExit, say) took the wire down: backward raises it.
        with track.lock, contextlib.suppress(BaseException):
            track.advance(wait=True)
    track.communicator.close()


def _receive(track: Track, inbox: "queue.SimpleQueue[bool]") -> bool:
    """Sleep until there is something to do; meanwhile note when collectives end.

    (A completion callback would be exact, but it would run Python on the backend's threads, and those
    abort the process if they complete while the interpreter shuts down.)
    """
    poll = _FIRST_POLL
    while track.in_flight():
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=poll)
        poll = min(2 * poll, _LAST_POLL)
    if track.mid_step:
        limit = track.communicator.limit.total_seconds()
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=limit)
        with track.lock:
            if track.mid_step and time.monotonic() - track.latest_arrival >= limit:
                track.fail(
                    WireError(
                        f"the step's last bucket did not come within {limit:g} s: backward was interrupted,"
                        " or a hook of yours passes only some buckets to thinwire; pass it all of them"
                    )
                )
        return True
    return inbox.get()
