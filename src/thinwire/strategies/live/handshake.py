"""The roll call that opens each exchange: what replicas tell each other, and what follows from it.

Every replica gathers the same rows, so all of them decide alike without another message.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from thinwire.engine.ops import AllGather, Collectives

_NAME_BYTES = 64
_NUMBERS = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """The row that a replica sends to the others at the start of an exchange.

    Attributes:
        set_up: A hash of configuration, versions and parameters, which must be equal on all replicas.
        lineage: A hash of all exchanges that have led to this replica's anchors.
        position: The exchanges committed so far, as the membership counts them.
        step: Training steps of the job, as this replica counts them.
        window: Training steps since this replica's parameters were last equal to its anchors.
        final: Whether this replica has ended its training, and only waits for the models to be equal.
        mixed: Whether this replica's shards come from different exchanges.
        nonce: A random number, which makes the exchange unique.
        name: The replica's name.
    """

    set_up: int
    lineage: int
    position: int
    step: int
    window: int
    final: bool
    mixed: bool = False
    nonce: int
    name: str

    def encoded(self, device: torch.device) -> torch.Tensor:
        """Return the row as 64-bit numbers."""
        text = self.name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        letters = torch.frombuffer(bytearray(text), dtype=torch.int64)
        numbers = torch.tensor(astuple(self)[:_NUMBERS], dtype=torch.int64, device="cpu")
        return torch.cat([numbers, letters]).to(device)


def decoded(numbers: torch.Tensor) -> Row:
    """Return the row that `Row.encoded` has written."""
    set_up, lineage, position, step, window, final, mixed, nonce = numbers[:_NUMBERS].tolist()
    letters = bytes(numbers[_NUMBERS:].contiguous().view(torch.uint8).tolist())
    return Row(
        set_up=set_up,
        lineage=lineage,
        position=position,
        step=step,
        window=window,
        final=bool(final),
        mixed=bool(mixed),
        nonce=nonce,
        name=letters.rstrip(b"\0").decode(errors="ignore"),
    )


def gather_rows(own: Row, device: torch.device) -> Collectives[torch.Tensor]:
    """Gather the rows of all replicas."""
    gathered: torch.Tensor = yield AllGather(own.encoded(device))
    return gathered


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision that follows from all replicas' rows. It is the same on each of them.

    Attributes:
        names: The replicas' names, by rank.
        step: The training step of the exchange, the largest of all.
        contributors: How many replicas have trained since they last held the anchors.
        final: Whether all replicas have ended their training.
        exchange: A number that names this exchange and no other.
        different: Ranks that are set up differently from most. They cannot take part.
        stale: Ranks whose anchors come from other exchanges than those of most.
        first: Whether no exchange has been committed yet.
    """

    names: tuple[str, ...]
    step: int
    contributors: int
    final: bool
    exchange: int
    different: frozenset[int]
    stale: frozenset[int]
    first: bool

    @property
    def blocked(self) -> bool:
        """True if replicas do not match, so that the exchange cannot take place."""
        return bool(self.different or self.stale)


def decide(rows: Sequence[Row]) -> Decision:
    """Return what follows from the rows of all replicas, by rank.

    Of two set-ups or lineages the more frequent one is kept, and of equally frequent ones that of the lowest
    rank. The lineage of a replica whose shards are mixed is kept only if there is no other.
    """
    return Decision(
        names=tuple(row.name for row in rows),
        step=max(row.step for row in rows),
        contributors=sum(row.window > 0 for row in rows),
        final=all(row.final for row in rows),
        exchange=hashed(*(row.nonce for row in rows)),
        different=_others([row.set_up for row in rows]),
        stale=_others(
            [row.lineage for row in rows], among=[row.lineage for row in rows if not row.mixed] or None
        ),
        first=max(row.position for row in rows) == 0,
    )


def hashed(*parts: object) -> int:
    """Return a hash of values with a stable repr, from 0 to below 2**47."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 17


def _others(values: Sequence[int], among: Sequence[int] | None = None) -> frozenset[int]:
    """Return the places whose value is not the most frequent one (of `among`), or the first of several."""
    # In the order of their first occurrence, where counts are equal.
    kept, _ = Counter(among or values).most_common(1)[0]
    return frozenset(place for place, value in enumerate(values) if value != kept)
