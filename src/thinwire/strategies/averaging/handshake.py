"""The handshake before each exchange of live replicas: their metadata, and the resulting decision.

    the ranks of one replica    agree on one `Row`
    all replicas                gather their `Row`s, and each computes the same `Decision` from them

Each rank of a sharded replica exchanges its own shards in a group of its own, and each of these groups has a
handshake. All ranks of a replica send the same row, so all groups decide alike without another message.
"""

import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Protocol

import torch

from thinwire.engine.ops import AllGather, Collectives
from thinwire.errors import MismatchError

_NAME_BYTES = 64
_NUMBERS = 8


class ReplicaRanks(Protocol):
    """The ranks of one replica."""

    def gather(self, numbers: Sequence[int], step: int) -> list[list[int]]:
        """Return the numbers of all ranks, in the order of ranks. Collective."""


class OneRank:
    """The ranks of a replica that is one process."""

    def gather(self, numbers: Sequence[int], step: int) -> list[list[int]]:
        """Return these numbers."""
        return [list(numbers)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The row that a replica sends to the others at the start of an exchange.

    Attributes:
        set_up: A hash of configuration, versions and parameters, which must be equal on all replicas.
        lineage: A hash of all exchanges that have led to this replica's anchors.
        position: The exchanges committed so far, as the quorum service counts them.
        step: Training steps of the job, as this replica counts them.
        window: Training steps since this replica's parameters were last equal to its anchors.
        final: Whether this replica has ended its training, and only waits for the models to be equal.
        nonce: A random number, which makes the exchange unique.
        mixed: Whether this replica's shards come from different exchanges. Each rank of a newcomer may
            receive its shards from another replica, and those may have committed different exchanges. Or one
            rank may receive nothing.
        name: The replica's name.
    """

    set_up: int
    lineage: int
    position: int
    step: int
    window: int
    final: bool
    mixed: bool = False
    nonce: int = field(default_factory=lambda: secrets.randbits(62))
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


def agree(ranks: ReplicaRanks, own: Row, *, connected: bool, fingerprint: int) -> Row | None:
    """Return the same row on all ranks of a replica. Collective among them.

    Args:
        ranks: The ranks of this replica.
        own: This rank's row.
        connected: Whether this rank is connected to the other replicas.
        fingerprint: A hash of the anchors' bits, or 0 where they are not compared.

    Returns:
        The row, whose lineage includes the fingerprints. None if a rank is not connected.

    Raises:
        MismatchError: The ranks are at different steps.
        WireError: A rank of this replica died or stalled.
    """
    numbers = [int(connected), own.lineage, fingerprint, own.step, own.window, int(own.final), own.nonce]
    rows = ranks.gather(numbers, own.step)
    flags, lineages, fingerprints, steps, windows, finals, nonces = zip(*rows, strict=True)
    if not all(flags):
        return None
    mixed = len(set(lineages)) > 1
    if not mixed and len({*zip(steps, finals, strict=True)}) > 1:
        raise MismatchError(
            f"the ranks of this replica are at steps {', '.join(map(str, steps))}, and {sum(finals)} of"
            f" {len(finals)} have called finalize: all of them must step their optimizers equally often"
        )
    return replace(
        own,
        lineage=hashed(lineages if mixed else lineages[0], fingerprints),
        mixed=mixed,
        step=max(steps),
        window=max(windows),
        nonce=nonces[0],
    )


def gather_rows(own: torch.Tensor) -> Collectives[torch.Tensor]:
    """Gather the tensors of all replicas, such as encoded rows."""
    gathered: torch.Tensor = yield AllGather(own)
    return gathered


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision that follows from all replicas' rows. It is the same on each of them.

    Attributes:
        names: The replicas' names, by rank.
        step: The training step of the exchange, the largest of all.
        contributors: The number of replicas that have trained since they last held the anchors.
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

    def named(self, ranks: frozenset[int]) -> str:
        """Return the names of some replicas as text."""
        return ", ".join(self.names[rank] for rank in sorted(ranks))


def decide(rows: Sequence[Row]) -> Decision:
    """Return the decision that follows from the rows of all replicas, by rank.

    Of two set-ups or lineages the more frequent one is kept, and of equally frequent ones that of the lowest
    rank. The lineage of a replica whose shards are mixed is kept only if there is no other.
    """
    # The lineage decides, not the service's position alone: replicas that committed different exchanges,
    # after a split or because one was left out of a quorum, can have equal positions. The minority falls
    # behind on purpose, so that the service hands it a peer's state.
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
    # Counter keeps the order of first occurrence where counts are equal.
    kept, _ = Counter(among or values).most_common(1)[0]
    return frozenset(place for place, value in enumerate(values) if value != kept)
