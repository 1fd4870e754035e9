"""Agreement of the ranks of one replica, before they exchange with the same ranks of other replicas.

Each rank of a sharded replica exchanges its own shards, in a group of its own. With the same row in each of
these groups, all ranks of all replicas decide alike.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.errors import MismatchError
from thinwire.strategies.live.handshake import hashed
from thinwire.strategies.live.replica import Replica


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
class ReplicaStatus:
    """The report of a replica to the others, the same on all of its ranks.

    Attributes:
        connected: Whether all ranks are connected to the other replicas.
        lineage: A hash of all exchanges that have led to the anchors, and of their bits where those are
            compared.
        mixed: Whether shards come from different exchanges. Each rank of a newcomer may receive its shards
            from another replica, and those may have committed different exchanges; or one rank may receive
            nothing.
        step: Training steps of the job.
        window: Training steps since the parameters were last equal to the anchors.
        nonce: A random number.
    """

    connected: bool
    lineage: int
    mixed: bool
    step: int
    window: int
    nonce: int


def agree(
    ranks: ReplicaRanks, replica: Replica, *, connected: bool, final: bool, check: bool
) -> ReplicaStatus:
    """Return what this replica tells the others. Collective among its ranks.

    Args:
        ranks: The ranks of this replica.
        replica: This rank's state.
        connected: Whether this rank is connected to the other replicas.
        final: Whether this rank has ended its training.
        check: Whether to compare the anchors' bits too.

    Raises:
        MismatchError: The ranks are at different steps.
        WireError: A rank of this replica died or stalled.
    """
    # Before the first exchange there is no lineage, but replicas must start from the same parameters.
    fingerprint = replica.fingerprint() if check or not replica.exchanges else 0
    own = [int(connected), replica.lineage, fingerprint, replica.step, replica.window, int(final)]
    rows = ranks.gather([*own, secrets.randbits(62)], replica.step)
    flags, lineages, fingerprints, steps, windows, finals, nonces = zip(*rows, strict=True)
    connected, mixed = all(flags), len(set(lineages)) > 1
    if connected and not mixed and len({*zip(steps, finals, strict=True)}) > 1:
        raise MismatchError(
            f"the ranks of this replica are at steps {', '.join(map(str, steps))}, and {sum(finals)} of"
            f" {len(finals)} have called finalize: all of them must step their optimizers equally often"
        )
    return ReplicaStatus(
        connected=connected,
        lineage=hashed(lineages if mixed else lineages[0], fingerprints),
        mixed=mixed,
        step=max(steps),
        window=max(windows),
        nonce=nonces[0],
    )
