"""The engine without its thread: moves programs forward in the static order."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch

from thinwire.errors import ProgramError, ThinwireError, WireError
from thinwire.wire.agree import ranks_text
from thinwire.wire.communicator import Communicator, Pending
from thinwire.wire.meter import Meter, OpRecord, StepTrace
from thinwire.wire.ops import Await, Collective, Steps
from thinwire.wire.schedule import Agenda

_ROLL_CALL = timedelta(seconds=3)


class Step:
    """The programs of one backward pass."""

    def __init__(self, trace: StepTrace) -> None:
        self.agenda = Agenda()
        self.runs: list[Run] = []
        self.trace = trace
        self.done = threading.Event()
        self.awaited_since: float | None = None


class Run:
    """One submitted program on its way to the end."""

    def __init__(
        self,
        program: Steps[torch.Tensor],
        label: str,
        last: bool,
        step: Step,
        device: torch.device,
    ) -> None:
        self.program: Steps[torch.Tensor] | None = program
        self.label = label
        self.last = last
        self.step = step
        self.pending: Pending | None = None
        self.record: OpRecord | None = None
        self.carries = ""
        devices = [] if device.type == "cpu" else [device]
        self._promise: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self.future = self._promise.then(_unwrap)

    def resolve(self, value: Any) -> None:
        """Hand the result, or the exception, to whoever holds the future."""
        self.program = self.pending = None
        self._promise.set_result(value)


class _Lost(Exception):
    """A collective ended badly: the peer, or the network between, is gone."""

    def __init__(self, run: Run, waited: float, reason: str) -> None:
        super().__init__(reason)
        self.run = run
        self.waited = waited


class Track:
    """Moves runs forward; never raises.

    Once something has failed, ranks may have parted ways, so the wire stays down: everything under way and
    everything submitted later gets the same error.
    """

    def __init__(self, communicator: Communicator, meter: Meter, *, timed: bool) -> None:
        self.communicator = communicator
        self.error: ThinwireError | None = None
        self._meter = meter
        self._timed = timed
        self._step: Step | None = None
        self._hanging_up: threading.Thread | None = None

    def raise_error(self) -> None:
        """Raise what took the wire down, if anything did.

        Each time anew: an exception remembers the frames it passed through, and those know the model, so
        one that is kept and raised again would keep the model alive.
        """
        if self.error is not None:
            raise type(self.error)(*self.error.args) from self.error.__cause__

    @property
    def mid_step(self) -> bool:
        """Whether a step was begun whose last program has not been accepted."""
        return self._step is not None

    def accept(self, run: Run) -> None:
        """Admit a program and go as far as the order allows."""
        step = self._step = run.step
        step.runs.append(run)
        step.agenda.arrive()
        if run.last:
            step.agenda.close()
        try:
            self.raise_error()
            self._advance(step)
        except ThinwireError as error:
            self.fail(error)
        except _Lost as lost:
            self.fail(self._explain(lost, step))
        except Exception as error:
            self.fail(WireError(f"{run.label}: {type(error).__name__}: {error}"))
        else:
            if step.agenda.finished:
                self._finish(step)

    def in_flight(self) -> bool:
        """Whether a collective is under way; notes the end of those that are not any more."""
        flying = False
        for run in self._step.runs if self._step else ():
            if run.pending is not None and run.record is not None and run.record.ended is None:
                if run.pending.done():
                    run.record.ended = time.perf_counter()
                else:
                    flying = True
        return flying

    def fail(self, error: ThinwireError) -> None:
        """Give every program of the step the error, tell the other ranks, and hang up."""
        first, self.error = self.error is None, error.with_traceback(None)
        step, self._step = self._step, None
        if first:
            self._report(f"failed: {error}")
        for run in step.runs if step else ():
            if run.program is not None:
                run.program.close()
                run.resolve(error)
        if step:
            step.done.set()
        self._hang_up()

    def join(self, seconds: float) -> None:
        """After a failure, give the process group some time to close."""
        if self._hanging_up is not None:
            self._hanging_up.join(seconds)

    def _advance(self, step: Step) -> None:
        while (turn := step.agenda.next()) is not None:
            bucket, stage = turn
            run = step.runs[bucket]
            op = self._resume(run, self._wait(run), stage)
            if op is not None:
                self._issue(run, bucket, stage, op)
                step.agenda.again(bucket, stage + 1)

    def _wait(self, run: Run) -> Any:
        """What the run's last collective delivered; None before its first."""
        if run.pending is None or run.record is None:
            return None
        started, reason = time.perf_counter(), ""
        try:
            received = run.pending.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        ended = time.perf_counter()
        if reason:  # raised out here, so that no traceback holds on to the collective
            raise _Lost(run, ended - started, reason)
        if run.record.ended is None:
            run.record.ended = ended
        return received

    def _resume(self, run: Run, received: Any, stage: int) -> Collective | Await | None:
        """The program's next collective, or None at its end."""
        assert run.program is not None
        started = time.perf_counter()
        try:
            return run.program.send(received)
        except StopIteration as stop:
            run.resolve(stop.value)
            return None
        except ThinwireError:
            raise
        except Exception as error:
            raise ProgramError(
                f"the program failed on {run.label}, after {stage} collectives:"
                f" {type(error).__name__}: {error}"
            ) from error
        finally:
            run.step.trace.compute_seconds += time.perf_counter() - started

    def _issue(self, run: Run, bucket: int, stage: int, op: Collective | Await) -> None:
        try:
            run.pending = self.communicator.issue(op)
        except RuntimeError as error:
            if isinstance(error, ThinwireError):
                raise
            raise ProgramError(f"the backend refuses {op}, for {run.label}: {error}") from error
        run.record = run.step.trace.issued(bucket, stage, op)
        run.carries = str(op)

    def _finish(self, step: Step) -> None:
        now = time.perf_counter()
        exposed = now - step.awaited_since if step.awaited_since is not None else 0.0
        self._meter.add(step.trace.finish(exposed, timed=self._timed))
        self._step = None
        step.done.set()

    def _explain(self, lost: _Lost, step: Step) -> WireError:
        """The error for a collective that failed, naming the ranks that may have caused it."""
        run = lost.run
        where = f"step {step.trace.step}, {run.label}, stage {run.record.stage if run.record else 0}"
        self._report(f"waited for {run.carries} at {where}")
        for other in step.runs:  # collectives hold the connections open
            other.pending = None
        self._hang_up()
        return WireError(
            f"rank {self.communicator.rank} waited {lost.waited:.1f} s for {run.carries} at {where}, and it"
            f" failed. {self._roll_call()} The backend said: {lost}"
            " The job cannot go on: restart it from its last checkpoint."
        )

    def _hang_up(self) -> None:
        """Close our connections, so that ranks which still wait for us learn of it at once.

        On a thread of its own: the backend closes only after collectives still under way have ended.
        """
        if self._hanging_up is None:
            self._hanging_up = threading.Thread(
                target=self.communicator.close, name="thinwire hanging up", daemon=True
            )
            self._hanging_up.start()

    def _report(self, text: str) -> None:
        try:
            self.communicator.meeting.report(text)
        except RuntimeError:  # the store's host is gone too: nobody is left to read it
            return

    def _roll_call(self) -> str:
        """Who answers after a failure, and who does not."""
        rank, size = self.communicator.rank, self.communicator.size
        try:
            reports = self.communicator.meeting.reports(_ROLL_CALL)
        except RuntimeError:
            return "The store does not answer either: its host, often rank 0's, has died."
        silent = [peer for peer in range(size) if peer not in reports]
        if silent:
            return f"No word from {ranks_text(silent)}: dead, stalled, or not taking part in this step."
        return " ".join(f"Rank {peer} {text}." for peer, text in reports.items() if peer != rank)


def _unwrap(future: "torch.futures.Future[Any]") -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value
