"""Short texts exchanged between ranks through the group's key-value store.

No collectives are used, so none can be mismatched. If a rank is missing, an error names it. In a collective,
the other ranks would only wait.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from thinwire.engine.comm.process_group import global_ranks, store_of, time_limit
from thinwire.errors import WireError

logger = logging.getLogger("thinwire")

Answer = TypeVar("Answer")

_FIRST_POLL, _LAST_POLL = 0.002, 0.1
_AT_LEAST = timedelta(seconds=3)
"""The minimum time for an answer of the store near the end of a wait, unless the limit is lower."""
_PATIENCE = 30.0
"""Seconds after which a wait is logged. The second and later lines follow after twice the time before."""
_MET = "met"
_FAILED = "thinwire/failed"
"""The key that exists once a rank has reported a failure."""


class StoreRendezvous:
    """A rendezvous point of one process group's ranks, where they exchange short texts.

    Args:
        group: The process group.
        limit: The time that the store may take to answer; by default the group's time limit.
        store: The group's store. Required if the group is not registered in torch.distributed.
    """

    def __init__(
        self, group: dist.ProcessGroup, limit: timedelta | None = None, store: dist.Store | None = None
    ) -> None:
        self.store = store or store_of(group)
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = global_ranks(group)
        """The ranks of the world, by rank of the group. Errors name these."""
        self._limit = limit or time_limit(group)
        self._stuck: threading.Thread | None = None
        self._reported = False

    def gather(self, topic: str, text: str, limit: timedelta) -> list[str]:
        """Exchange one text per rank.

        The n-th call on a topic is matched with the other ranks' n-th call on it. It succeeds on all ranks or
        on none: the first rank to finish waiting writes the verdict, and a late rank reads it.

        Args:
            topic: The kind of exchange. Only calls on the same topic are matched, and errors name it.
            text: This rank's text.
            limit: How long to wait for the others.

        Returns:
            All ranks' texts, by rank.

        Raises:
            WireError: A rank did not call it within `limit`. Raised on every rank, with the missing ranks.
        """
        occasion = self.post(topic, text)
        keys = self._keys(topic, occasion)
        absent = self._await(keys, limit, topic)
        # Rank 0 gives up on rank 2 at the limit. A moment later rank 2 arrives, finds everybody's text, and
        # would go on alone. So the first rank to finish waiting writes the verdict (`compare_set` keeps the
        # first value), and all ranks act on it, not on what they have seen themselves.
        verdict = f"thinwire/{topic}/{occasion}/verdict"
        wanted = self.text(absent) if absent else _MET
        agreed = self.ask(lambda store: store.compare_set(verdict, "", wanted).decode())
        if agreed != _MET:
            raise WireError(
                f"{topic!r} timed out on rank {self.ranks[self.rank]} after {limit.total_seconds():g} s:"
                f" {agreed} did not reach it in time. Every rank of the group must make the same calls in the"
                " same order; check the logs of the missing rank"
            )
        # One request: W requests on each of W ranks would be millions where there are thousands of ranks.
        return self.ask(lambda store: [text.decode() for text in store.multi_get(keys)])

    def text(self, ranks: Iterable[int]) -> str:
        """Return ranks of this group as text, numbered as ranks of the world."""
        return ranks_text([self.ranks[rank] for rank in ranks])

    def post(self, topic: str, text: str) -> int:
        """Write this rank's text on a topic without waiting, and return the number of the call."""
        occasion = self.count(topic)
        key = self._keys(topic, occasion)[self.rank]
        self.ask(lambda store: store.set(key, text))
        return occasion

    def _keys(self, topic: str, occasion: int) -> list[str]:
        return [f"thinwire/{topic}/{occasion}/{rank}" for rank in range(self.size)]

    def count(self, topic: str) -> int:
        """Count and return this rank's calls on a topic in the life of the store, this one included."""
        return int(self.ask(lambda store: store.add(f"thinwire/{topic}/count/{self.rank}", 1)))

    def part(self, limit: timedelta) -> None:
        """Declare that this rank is done, and wait up to `limit` until the others are."""
        key = f"thinwire/done/{self.rank}"
        self.ask(lambda store: store.set(key, ""), limit)
        self._await([f"thinwire/done/{rank}" for rank in range(self.size)], limit)

    def report(self, text: str, limit: timedelta) -> None:
        """Report a failure of this rank to the others. Only the first report is kept."""
        if not self._reported:
            self._reported = True
            # The text before the flag, because a rank that finds the flag reads the texts at once.
            self.ask(lambda store: store.set(f"thinwire/failure/{self.rank}", text), limit)
            self.ask(lambda store: store.set(_FAILED, ""), limit)

    def reports(self, limit: timedelta) -> dict[int, str]:
        """Wait up to `limit` for all ranks' reports of failures, and return those that arrived, by rank."""
        keys = [f"thinwire/failure/{rank}" for rank in range(self.size)]
        absent = self._await(keys, limit)
        present = [rank for rank in range(self.size) if rank not in absent]
        return self.ask(lambda store: {rank: store.get(keys[rank]).decode() for rank in present}, limit)

    def reported(self) -> dict[int, str]:
        """Return the ranks' reports of failures so far, without waiting for more.

        Without a failure it is one request, for any number of ranks.
        """
        if not self.ask(lambda store: store.check([_FAILED])):
            return {}
        keys = {rank: f"thinwire/failure/{rank}" for rank in range(self.size)}
        return self.ask(
            lambda store: {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        )

    def _await(self, keys: list[str], limit: timedelta, topic: str | None = None) -> list[int]:
        """Wait for all keys, and return the indices of those still missing at the end.

        Args:
            keys: One key per rank.
            limit: How long to wait.
            topic: The call that ranks wait in. A long wait is logged under this name, or not at all.
        """
        begun = time.monotonic()
        deadline, patience = begun + limit.total_seconds(), _PATIENCE
        poll, least = _FIRST_POLL, min(_AT_LEAST, limit)
        while True:
            now = time.monotonic()
            left = timedelta(seconds=deadline - now)
            if self.ask(lambda store: store.check(keys), max(left, least)):
                return []
            if left < timedelta(0):
                return self.ask(lambda store: _missing(store, keys), least)
            if topic is not None and now - begun >= patience:
                absent = self.ask(lambda store: _missing(store, keys), max(left, least))
                if absent:
                    self._log_wait(topic, absent, now - begun, limit)
                patience *= 2
            time.sleep(poll)
            poll = min(2 * poll, _LAST_POLL)

    def _log_wait(self, topic: str, absent: Sequence[int], waited: float, limit: timedelta) -> None:
        """Log a long wait, because a rank that never makes a call looks like a hang to the others."""
        names = self.text(absent)
        logger.warning(
            "rank %d is still waiting for %s in %s, after %.0f s of at most %g s: every rank of the group"
            " must make this call; check the logs of the missing ones",
            self.ranks[self.rank],
            names,
            f"{topic}()" if topic.isidentifier() else repr(topic),
            waited,
            limit.total_seconds(),
        )

    def ask(self, question: Callable[[dist.Store], Answer], limit: timedelta | None = None) -> Answer:
        """Return the store's answer; raise WireError if the store is gone or does not answer in time."""
        try:
            return self.within(limit or self._limit, lambda: question(self.store))
        except WireError:
            raise
        except RuntimeError as error:
            raise self._silence(f"said: {str(error).partition(chr(10))[0]}") from error

    def within(self, limit: timedelta, question: Callable[[], Answer], *, holds_store: bool = True) -> Answer:
        """Return the result of a call that needs the store; raise WireError if it takes longer than `limit`.

        The store's client waits for its host without a limit, so it would hang if the host is frozen. A
        daemon thread therefore makes the call. A thread that gets no answer is abandoned. While it waits,
        later calls fail at once, because the client serves one call at a time.

        Args:
            limit: How long to wait for the call.
            question: The call.
            holds_store: Whether the call can wait for nothing but the store. Otherwise RuntimeError is raised
                instead, since the store need not be the cause.
        """
        if self._stuck is not None and self._stuck.is_alive():
            raise self._silence("has still not answered an earlier request")
        answers: list[tuple[Answer | None, BaseException | None]] = []

        # A thread for each call: calls are rare, and so no thread has to be stopped at exit.
        def ask() -> None:
            try:
                answers.append((question(), None))
            except BaseException as error:
                answers.append((None, error))

        thread = threading.Thread(target=ask, name="thinwire store request", daemon=True)
        thread.start()
        thread.join(limit.total_seconds())
        if not answers:
            if not holds_store:
                raise RuntimeError(f"it took longer than {limit.total_seconds():g} s")
            self._stuck = thread
            raise self._silence(f"has not answered for {limit.total_seconds():g} s")
        answer, error = answers.pop()
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]

    def _silence(self, what: str) -> WireError:
        return WireError(
            f"rank {self.ranks[self.rank]} gets no answer from torch.distributed's store: it {what}. The"
            " process that hosts it, often rank 0, has died, is frozen or cannot be reached: check its logs,"
            " and restart the job from its last checkpoint"
        )


def _missing(store: dist.Store, keys: Sequence[str], start: int = 0) -> list[int]:
    """Return the indices of keys that are missing, with few requests if only a few are.

    A request for each key on each of W ranks would be millions where there are thousands of ranks.
    """
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [start]
    half = len(keys) // 2
    return _missing(store, keys[:half], start) + _missing(store, keys[half:], start + half)


def ranks_text(ranks: list[int]) -> str:
    """Return ranks as text, `rank 2` or `ranks 0, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
