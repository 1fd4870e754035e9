"""Collectives that were issued and may still be in flight."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire.errors import WireError

_FUTURE_POLL = 0.0005


class Pending(Protocol):
    """A collective that was issued."""

    def done(self) -> bool:
        """Return whether it is known to have ended or failed, without blocking.

        A message is known to have ended only after `complete` or `wait` returned.
        """

    def landed(self) -> bool:
        """Return whether an accelerator has finished it, or it failed. On the CPU, `wait` tells that."""

    def complete(self) -> None:
        """Wait until it has ended or failed, and raise nothing. Another thread may call `wait` later."""

    def wait(self) -> Any:
        """Wait for the collective.

        Returns:
            The value that the program receives. On an accelerator, it is ordered on the current stream.

        Raises:
            RuntimeError: The collective failed.
        """


class Issued:
    """Torch's `Work` objects, and a function that returns their result.

    Args:
        works: The return values of torch.distributed.
        value: Returns the result, once all works have ended.
    """

    def __init__(self, works: Sequence[dist.Work | None], value: Callable[[], Any]) -> None:
        self._works = [work for work in works if work is not None]
        assert len(self._works) == len(works), "torch.distributed returns no work to ranks outside the group"
        self._value = value
        self._lock = threading.Lock()
        self._ended = False
        self._failure: str | None = None

    @classmethod
    def failed(cls, error: RuntimeError) -> "Issued":
        """Return a collective that has failed already, which `wait` reports."""
        failed = cls([], lambda: None)
        failed._ended, failed._failure = True, str(error)
        return failed

    def done(self) -> bool:
        """Return whether all works are known to have ended."""
        return self._ended or all(work.is_completed() for work in self._works)

    def landed(self) -> bool:
        """Return whether all works have ended on their device."""
        # Not `_ended`: on an accelerator, `Work.wait` makes the stream wait and returns at once.
        return self._failure is not None or all(work.is_completed() for work in self._works)

    def complete(self) -> None:
        """Wait for all works, and keep the first failure for `wait`."""
        # Gloo counts a message's arrival once: a second wait for it, also on another thread, would time out.
        with self._lock:
            if self._ended:
                return
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                self._failure = str(error)
                self._works = []  # pending messages would keep the connections open
            self._ended = True

    def wait(self) -> Any:
        """Wait for all works and return the result; raise RuntimeError if one failed."""
        self.complete()
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return self._value()


class Arrived:
    """A result that needed no network."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        """Return True."""
        return True

    landed = done

    def complete(self) -> None:
        """Do nothing."""

    def wait(self) -> Any:
        """Return the result."""
        return self._value


class PendingFuture:
    """A future that is completed outside the engine. It has a time limit, unlike torch's futures."""

    def __init__(self, future: "torch.futures.Future[Any]", limit: timedelta) -> None:
        self._future = future
        self._limit = limit.total_seconds()
        self._expired = False

    def done(self) -> bool:
        """Return whether the future is completed or the limit exceeded."""
        return self._expired or bool(self._future.done())

    landed = done

    def complete(self) -> None:
        """Wait for the future, up to the limit."""
        deadline = time.monotonic() + self._limit
        while not self.done():
            self._expired = time.monotonic() > deadline
            time.sleep(_FUTURE_POLL)

    def wait(self) -> Any:
        """Return the future's value; raise WireError at the limit, or the future's own error."""
        self.complete()
        if not self._future.done():
            raise WireError(f"the future was not completed in time, within {self._limit:g} s")
        return self._future.wait()
