"""Disjoint groups of a model's ranks that average among themselves."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

import torch.distributed as dist

from thinwire.codecs.checks import is_whole
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.errors import MismatchError, OptionError

NODE: Literal["node"] = "node"


@dataclass(frozen=True)
class OwnGroup:
    """A process group given as an option, different on each rank."""

    group: dist.ProcessGroup

    def __repr__(self) -> str:
        """Return the same text on every rank, so that configurations compare equal."""
        return "each rank's process group"


Groups: TypeAlias = "int | Literal['node'] | OwnGroup | dist.ProcessGroup | Sequence[Sequence[int]] | None"


def check_groups(name: str, groups: Groups) -> Groups:
    """Return groups in a form that can be compared across ranks.

    Args:
        name: The option's name, for the error message.
        groups: The groups as the user gave them.

    Raises:
        OptionError: The value does not describe groups of ranks.
    """
    if groups is None or groups == NODE or isinstance(groups, OwnGroup):
        return groups
    if isinstance(groups, dist.ProcessGroup):
        return OwnGroup(groups)
    if is_whole(groups):
        if groups < 1:
            raise OptionError(f"{name}={groups} must be at least 1: it is the number of ranks in a group")
        return groups
    if isinstance(groups, Sequence) and not isinstance(groups, str):
        lists = tuple(tuple(ranks) if isinstance(ranks, Sequence) else () for ranks in groups)
        members = [rank for ranks in lists for rank in ranks]
        if all(lists) and all(map(is_whole, members)) and sorted(members) == list(range(len(members))):
            return tuple(tuple(sorted(ranks)) for ranks in lists)
        raise OptionError(
            f"{name}={groups!r} must contain every rank in exactly one list, as in [[0, 1], [2]]"
        )
    raise OptionError(
        f"{name}={groups!r} does not describe groups of ranks: pass a number of ranks, {NODE!r}, lists of"
        " ranks, or the process group that this rank is in"
    )


def members_of(groups: Groups, communicator: GroupCommunicator, parent: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of this rank's group, itself included. Collective."""
    rank, size = communicator.rank, communicator.size
    if groups is None:
        return (rank,)
    if groups == NODE:
        return ranks_on_this_node(communicator.rendezvous, communicator.limit)
    if isinstance(groups, OwnGroup):
        return _members_of_own(groups.group, communicator, parent)
    if is_whole(groups):
        first = rank - rank % groups
        return tuple(range(first, min(first + groups, size)))
    assert isinstance(groups, tuple), "check_groups returns lists of ranks as tuples"
    members: tuple[int, ...] = next(ranks for ranks in groups if rank in ranks)
    return members


def _members_of_own(
    group: dist.ProcessGroup, communicator: GroupCommunicator, parent: dist.ProcessGroup
) -> tuple[int, ...]:
    """Return the members of a process group, numbered within the model's group instead of globally."""
    all_ranks = dist.get_process_group_ranks(parent)
    own = sorted(all_ranks.index(rank) for rank in dist.get_process_group_ranks(group) if rank in all_ranks)
    texts = communicator.rendezvous.gather("groups", json.dumps(own), communicator.limit)
    groups = [json.loads(text) for text in texts]
    for rank, ranks in enumerate(groups):
        if rank not in ranks or any(groups[other] != ranks for other in ranks):
            named = [[all_ranks[member] for member in members] for members in groups]
            raise MismatchError(
                f"rank {all_ranks[rank]} gave a process group of the ranks {named[rank]}, which is not what"
                f" those ranks gave: {named}. Each rank must pass the group that it is in, as"
                " new_subgroups returns it"
            )
    return tuple(own)


def ranks_on_this_node(rendezvous: StoreRendezvous, limit: timedelta) -> tuple[int, ...]:
    """Return the ranks on this rank's node. Collective.

    A node is identified by torchrun's GROUP_RANK, or else by its host name. Nodes may differ in size.
    """
    own = os.environ.get("GROUP_RANK") or socket.gethostname()
    nodes = rendezvous.gather("nodes", own, limit)
    return tuple(rank for rank, node in enumerate(nodes) if node == own)
