"""The engine without its thread: moves programs forward in the static order."""

import collections
import contextlib
import threading
import time
from typing import Any

import torch

from thinwire.errors import ProgramError, ThinwireError, WireError
from thinwire.wire.agree import ranks_text
from thinwire.wire.communicator import Communicator, NotConnectedError, Pending
from thinwire.wire.meter import Meter, OpRecord, StepTrace
from thinwire.wire.ops import Await, Collective, Steps
from thinwire.wire.schedule import Agenda


class Step:
    """The programs of one backward pass."""

    def __init__(self, trace: StepTrace) -> None:
        self.agenda = Agenda()
        self.runs: list[Run] = []
        self.trace = trace
        self.done = threading.Event()
        self.awaited_since: float | None = None
        self.guarded = False
        """Whether somebody is certain to raise the step's error, so that futures need not carry it."""

    def end(self) -> None:
        """Nothing more will happen; let go of the buckets."""
        self.runs.clear()
        self.done.set()


class Run:
    """One submitted program on its way to the end.

    Args:
        program: The generator.
        label: What it works on; shown in errors.
        last: Whether it ends its step.
        step: The step it belongs to.
        instead: What the future shall hold if the program fails in a guarded step.
    """

    def __init__(
        self, program: Steps[torch.Tensor], label: object, last: bool, step: Step, instead: torch.Tensor
    ) -> None:
        self.program: Steps[torch.Tensor] | None = program
        self.label = label
        self.last = last
        self.step = step
        self.op: Collective | Await | None = None
        self.pending: Pending | None = None
        self.record: OpRecord | None = None
        devices: list[int | str | torch.device] = [] if instead.device.type == "cpu" else [instead.device]
        self._instead: torch.Tensor | None = instead
        self._promise: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self.future = self._promise.then(unwrap)

    def resolve(self, value: Any) -> None:
        """Hand the result to whoever holds the future."""
        self.program = self.op = self.pending = self._instead = None
        self._promise.set_result(value)

    def fail(self, error: ThinwireError) -> None:
        """End without a result: the future holds the error, or in a guarded step something harmless.

        DDP cannot raise what a future holds without losing its type.
        """
        if self.program is not None:
            with contextlib.suppress(Exception):  # its clean-up is its own affair
                self.program.close()
            self.resolve(self._instead if self.step.guarded else _anew(error))


class _LostError(Exception):
    """A collective ended badly: the peer, or the network between, is gone."""

    def __init__(self, run: Run, waited: float, reason: str) -> None:
        super().__init__(reason)
        self.run = run
        self.waited = waited


class Track:
    """Moves runs forward, whichever thread pushes; what goes wrong is kept in `error`, not raised.

    Only one thread at a time may `advance`: hold `lock`.

    Once something has failed, ranks may have parted ways, so the wire stays down: everything under way and
    everything submitted later gets the same error.
    """

    def __init__(self, communicator: Communicator, meter: Meter, device_type: str) -> None:
        self.communicator = communicator
        self.lock = threading.Lock()
        self.error: ThinwireError | None = None
        self.latest_arrival = 0.0
        self._meter = meter
        self._device_type = device_type
        self._arriving: collections.deque[Run] = collections.deque()
        self._step: Step | None = None
        self._hanging_up: threading.Thread | None = None

    def raise_error(self) -> None:
        """Raise what took the wire down, if anything did.

        Each time anew, and its cause only the first time: exceptions remember the frames they passed
        through, and those know the model, so keeping one would keep the model alive.
        """
        if self.error is not None:
            cause, self.error.__cause__ = self.error.__cause__, None
            raise _anew(self.error) from cause

    @property
    def mid_step(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def add(self, run: Run) -> None:
        """Queue a program; needs no lock."""
        self.latest_arrival = time.monotonic()
        self._arriving.append(run)

    def advance(self, *, wait: bool) -> None:
        """Go as far as the order allows; unless `wait`, only as far as no collective is waited for."""
        interrupt: BaseException | None = None
        # Whichever thread this is: programs must not see its modes, or timing would change their numbers.
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
            while (step := self._admit()) is not None:
                stuck, failure = False, self.error
                if failure is None:
                    stuck, failure, interrupt = self._attempt(step, wait)
                if failure is not None:
                    self.fail(failure)
                elif step.agenda.finished:
                    self._finish(step)
                elif stuck or not self._arriving:
                    return
        if interrupt is not None:
            raise interrupt

    def _attempt(self, step: Step, wait: bool) -> tuple[bool, ThinwireError | None, BaseException | None]:
        """Take turns; whether that got stuck, what failed, and what interrupted it.

        Failures are dealt with by the caller: what is raised while an exception is being handled remembers
        that one, and through it the model.
        """
        lost: _LostError | None = None
        try:
            return self._take_turns(step, wait), None, None
        except ThinwireError as error:
            return False, error, None
        except _LostError as error:
            lost = error
        except BaseException as error:  # Ctrl-C in backward's thread, or a defect of ours
            return False, WireError(f"interrupted by {type(error).__name__}: {error}"), error
        return False, self._explain(lost, step), None

    def _admit(self) -> Step | None:
        """Take in what has arrived for the step under way, or begin the next; the step, if there is one."""
        if self._step is None and self._arriving:
            self._step = self._arriving[0].step
        while self._arriving and self._arriving[0].step is self._step:
            run = self._arriving.popleft()
            run.step.runs.append(run)
            run.step.agenda.arrive()
            if run.last:
                run.step.agenda.close()
        return self._step

    def in_flight(self) -> bool:
        """Whether a collective is under way; notes the end of those that are not any more. Needs no lock."""
        step, flying = self._step, False
        for run in tuple(step.runs) if step else ():
            pending, record = run.pending, run.record
            if pending is not None and record is not None and record.ended is None:
                if pending.done():
                    record.ended = time.perf_counter()
                else:
                    flying = True
        return flying

    def fail(self, error: ThinwireError) -> None:
        """Give every program of the step the error, tell the other ranks, and hang up."""
        first, self.error = self.error is None, error.with_traceback(None)
        error.__context__ = None
        step, self._step = self._step, None
        if first:
            self._report(f"failed: {error}")
        for run in step.runs if step else ():
            run.fail(error)
        if step:
            step.end()
        self._hang_up()

    def join(self, seconds: float) -> None:
        """After a failure, give the process group some time to close."""
        if self._hanging_up is not None:
            self._hanging_up.join(seconds)

    def _take_turns(self, step: Step, wait: bool) -> bool:
        """Deal out the step's turns; whether it stopped because a collective is still under way."""
        while (turn := step.agenda.next()) is not None:
            bucket, stage = turn
            run = step.runs[bucket]
            if not wait and run.pending is not None and not run.pending.done():
                step.agenda.again(bucket, stage)
                return True
            op = self._resume(run, self._wait(run), stage)
            if op is not None:
                self._issue(run, bucket, stage, op)
                step.agenda.again(bucket, stage + 1)
        return False

    def _wait(self, run: Run) -> Any:
        """What the run's last collective delivered; None before its first."""
        if run.pending is None or run.record is None:
            return None
        started, received, reason = time.perf_counter(), None, None
        try:
            received = run.pending.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        ended = time.perf_counter()
        if reason is not None:  # raised out here, so that no traceback holds on to the collective
            raise _LostError(run, ended - started, reason)
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
        started, run.op, lost = time.perf_counter(), op, None
        try:
            pending = self.communicator.issue(op)
        except NotConnectedError as error:
            lost = str(error).partition("\n")[0]
        except RuntimeError as error:
            if isinstance(error, ThinwireError):
                raise
            raise ProgramError(f"the backend refuses {op}, for {run.label}: {error}") from error
        if lost is not None:
            raise _LostError(run, time.perf_counter() - started, lost)
        run.record = run.step.trace.issued(bucket, stage, op)
        run.pending = pending

    def _finish(self, step: Step) -> None:
        now = time.perf_counter()
        exposed = now - step.awaited_since if step.awaited_since is not None else 0.0
        self._meter.add(step.trace.finish(exposed, timed=self._device_type == "cpu"))
        self._step = None
        step.end()

    def _explain(self, lost: _LostError, step: Step) -> WireError:
        """The error for a collective that failed, naming the ranks that may have caused it."""
        run, waited_for = lost.run, str(lost.run.op)
        where = f"step {step.trace.step}, {run.label}, stage {run.record.stage if run.record else 0}"
        self._report(f"waited for {waited_for} at {where}")
        for other in step.runs:  # collectives hold the connections open
            other.pending = None
        self._hang_up()
        return WireError(
            f"rank {self.communicator.rank} waited {lost.waited:.1f} s for {waited_for} at {where}, and it"
            f" failed. {self._roll_call(run.op)} The job cannot go on: restart it from its last checkpoint."
            f" (The backend said: {lost})"
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

    def _roll_call(self, op: object) -> str:
        """Who answers after a failure, and who does not.

        Ranks that were no part of the collective may well have nothing to report: they are only named if all
        that were have answered, and so failed for another's sake.
        """
        rank, size = self.communicator.rank, self.communicator.size
        try:
            reports = self.communicator.meeting.reports(self.communicator.roll_call)
        except RuntimeError:
            return "The store does not answer either: its host, often rank 0's, has died."
        silent = [peer for peer in range(size) if peer not in reports]
        concerned = getattr(op, "ranks", None) or range(size)
        silent = [peer for peer in silent if peer in concerned] or silent
        if silent:
            return f"No word from {ranks_text(silent)}: dead, stalled, or not taking part in this step."
        return " ".join(f"Rank {peer} {text}." for peer, text in reports.items() if peer != rank)


def _anew(error: ThinwireError) -> ThinwireError:
    """The same error without a past; a subclass's constructor may want other arguments than it keeps."""
    copy = type(error).__new__(type(error))
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    return copy


def unwrap(future: "torch.futures.Future[Any]") -> Any:
    """A future's value; one that is an error is raised."""
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value
