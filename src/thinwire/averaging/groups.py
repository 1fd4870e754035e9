"""Who averages with whom: the ranks of a model in disjoint groups."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

from thinwire.averaging.nodes import ranks_on_this_node
from thinwire.codecs.codec import is_whole
from thinwire.errors import MismatchError, OptionError
from thinwire.wire.communicator import Communicator

NODE = "node"


@dataclass(frozen=True)
class OwnGroup:
    """A process group that this rank gave; other ranks gave theirs."""

    group: dist.ProcessGroup

    def __repr__(self) -> str:
        """The same on every rank."""
        return "each rank's process group"


Groups: TypeAlias = "int | str | OwnGroup | dist.ProcessGroup | Sequence[Sequence[int]] | None"


def check_groups(name: str, groups: Groups) -> Groups:
    """The groups in a form that compares across ranks; OptionError for what are none."""
    if groups is None or groups == NODE or isinstance(groups, OwnGroup):
        return groups
    if isinstance(groups, dist.ProcessGroup):
        return OwnGroup(groups)
    if is_whole(groups):
        if groups < 1:
            raise OptionError(f"{name}={groups} must be at least 1: so many ranks are in a group")
        return groups
    if isinstance(groups, Sequence) and not isinstance(groups, str):
        lists = tuple(tuple(ranks) if isinstance(ranks, Sequence) else () for ranks in groups)
        members = [rank for ranks in lists for rank in ranks]
        if all(lists) and all(map(is_whole, members)) and sorted(members) == list(range(len(members))):
            return tuple(tuple(sorted(ranks)) for ranks in lists)
        raise OptionError(
            f"{name}={groups!r} must hold every rank from 0 on in exactly one list: as in [[0, 1], [2]]"
        )
    raise OptionError(
        f"{name}={groups!r} is no way to group ranks: give a number of ranks, {NODE!r}, lists of ranks, or"
        " the process group that this rank is in"
    )


def members_of(groups: Groups, communicator: Communicator, parent: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks that this one is grouped with, itself among them; every rank must ask at the same point."""
    rank, size = communicator.rank, communicator.size
    if groups is None:
        return (rank,)
    if groups == NODE:
        return ranks_on_this_node(communicator.meeting, communicator.limit)
    if isinstance(groups, OwnGroup):
        return _members_of_own(groups.group, communicator, parent)
    if is_whole(groups):
        first = rank - rank % groups
        return tuple(range(first, min(first + groups, size)))
    assert isinstance(groups, tuple), "check_groups made it so"
    members: tuple[int, ...] = next(ranks for ranks in groups if rank in ranks)
    return members


def _members_of_own(
    group: dist.ProcessGroup, communicator: Communicator, parent: dist.ProcessGroup
) -> tuple[int, ...]:
    """Ranks count globally in a process group; here they count within the model's."""
    everybody = dist.get_process_group_ranks(parent)
    own = sorted(everybody.index(rank) for rank in dist.get_process_group_ranks(group) if rank in everybody)
    told = communicator.meeting.gather("groups", json.dumps(own), communicator.limit)
    groups = [json.loads(text) for text in told]
    for rank, ranks in enumerate(groups):
        if rank not in ranks or any(groups[other] != ranks for other in ranks):
            raise MismatchError(
                f"rank {rank} gave a process group of the ranks {ranks}, which is not what those ranks gave:"
                f" {groups}. Each rank must give the group that it is in, as new_subgroups returns it"
            )
    return tuple(own)
