"""Agreement between ranks through the group's key-value store: no collectives, so no way to mismatch one.

A rank that does not show up is named, instead of leaving the others inside a collective.
"""

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.errors import WireError

_FIRST_POLL, _LAST_POLL = 0.002, 0.1
_MET = "met"


class Meeting:
    """Where the ranks of one process group exchange short texts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.store = distributed_c10d._get_process_group_store(group)
        self._reported = False

    def gather(self, topic: str, text: str, limit: timedelta) -> list[str]:
        """Every rank's text on a topic, by rank; or WireError, on every rank, naming the absent ones.

        The n-th call on a topic meets the other ranks' n-th call on it. Either all ranks have met within
        `limit`, or none has: a rank that comes late finds that the others have given up.
        """
        occasion = self.post(topic, text)
        keys = self._keys(topic, occasion)
        absent = self._await(keys, limit)
        verdict = f"thinwire/{topic}/{occasion}/verdict"
        wanted = f"gave up on {ranks_text(absent)}" if absent else _MET
        agreed = self.store.compare_set(verdict, "", wanted).decode()
        if agreed != _MET:
            raise WireError(
                f"rank {self.rank} could not meet the others at {topic!r}: after {limit.total_seconds():g} s"
                f" a rank {agreed}. Every rank of the group must make the same calls in the same order; look"
                " at the logs of the missing rank"
            )
        return [self.store.get(key).decode() for key in keys]

    def post(self, topic: str, text: str) -> int:
        """Say something on a topic without waiting for the others; returns the occasion's number."""
        occasion = self.count(topic)
        self.store.set(self._keys(topic, occasion)[self.rank], text)
        return occasion

    def _keys(self, topic: str, occasion: int) -> list[str]:
        return [f"thinwire/{topic}/{occasion}/{rank}" for rank in range(self.size)]

    def count(self, topic: str) -> int:
        """How often this rank has come to a topic, this time included, in the life of the store."""
        return int(self.store.add(f"thinwire/{topic}/count/{self.rank}", 1))

    def report(self, text: str) -> None:
        """Leave word of a failure here, for the others to find; the first word stands."""
        if not self._reported:
            self._reported = True
            self.store.set(f"thinwire/failure/{self.rank}", text)

    def reports(self, limit: timedelta) -> dict[int, str]:
        """What the ranks that are still alive reported, by rank; waits up to `limit` for all of them."""
        keys = [f"thinwire/failure/{rank}" for rank in range(self.size)]
        absent = self._await(keys, limit)
        present = [rank for rank in range(self.size) if rank not in absent]
        return {rank: self.store.get(keys[rank]).decode() for rank in present}

    def _await(self, keys: list[str], limit: timedelta) -> list[int]:
        """Wait for all keys; the indices of those still missing at the end."""
        deadline = time.monotonic() + limit.total_seconds()
        poll = _FIRST_POLL
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return [index for index, key in enumerate(keys) if not self.store.check([key])]
            time.sleep(poll)
            poll = min(2 * poll, _LAST_POLL)
        return []


def ranks_text(ranks: list[int]) -> str:
    """`rank 2`, or `ranks 0, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
