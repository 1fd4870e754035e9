"""Futures that detect when a hook waits for them, and a mark for threads that run inside an engine."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thinwire.engine.comm.process_group import unwrap_with


class _Marks(threading.local):
    depth = 0


_marks = _Marks()


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Mark this thread as being inside the engine."""
    _marks.depth += 1
    try:
        yield
    finally:
        _marks.depth -= 1


def is_at_work() -> bool:
    """Return whether this thread is inside the engine, as callbacks and signal handlers may be."""
    return _marks.depth > 0


class Result(torch.futures.Future[Any]):
    """The future of a program's result, or of a callback's.

    A hook may wait for it, as torch's single-stage hooks allow. The engine must be notified of the wait.
    Otherwise the wait would never end, because the engine delays a bucket's second collective until later
    buckets have issued their first, and DDP passes those buckets to the hook only after the wait.

    Args:
        device: The device of the result.
        awaited: Called before each wait by a thread that is not inside an engine. None if no engine runs it.
    """

    def __init__(self, device: torch.device, awaited: Callable[[], None] | None = None) -> None:
        devices: list[int | str | torch.device] = [] if device.type == "cpu" else [device]
        super().__init__(devices=devices)
        self._device, self._awaited = device, [] if awaited is None else [awaited]

    def wait(self) -> Any:
        """Wait for the value, and raise if it is an error.

        The engine is notified even if the result is available already, because that differs between ranks.
        """
        if not is_at_work():
            for notify in self._awaited:
                notify()
        return super().wait()

    def depend_on(self, other: "torch.futures.Future[Any]") -> None:
        """Notify the engine of `other` too before each wait, because this result waits for that one."""
        if isinstance(other, Result):
            self._awaited = [*other._awaited, *self._awaited]

    def then(self, callback: Callable[["torch.futures.Future[Any]"], Any]) -> "Result":
        """Return a future of the result of `callback`; waits for that future are detected too."""
        result = Result(self._device)
        result.depend_on(self)

        def relay(done: "torch.futures.Future[Any]") -> None:
            try:
                with at_work():  # timing decides which thread runs it, so a wait in it is not a hook's
                    value = callback(done)
            except BaseException as error:
                result.fail(error)
            else:
                result.set_result(value)

        super().then(relay)
        return result

    def add_done_callback(self, callback: Callable[["torch.futures.Future[Any]"], None]) -> None:
        """Call `callback` when the result is available."""

        def call(done: "torch.futures.Future[Any]") -> None:
            with at_work():
                callback(done)

        super().add_done_callback(call)

    def fail(self, error: BaseException) -> None:
        """Complete with an error, which every wait raises."""

        def unwrap(failure: _Failure) -> None:
            raise failure.error

        unwrap_with(self, unwrap)
        self.set_result(_Failure(error))


class _Failure:
    """The value of a failed future. DDP's C++ code prints it in its error that the value is not a tensor."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        return f"({type(self.error).__name__}: {self.error})"
