"""Over whom to average: which group, and which of its ranks share a node."""

import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from thinwire.errors import OptionError
from thinwire.programs.program import Bucket, Memory, Outcome, Program
from thinwire.wire.agree import Meeting
from thinwire.wire.ops import Steps, among

_NODES = "nodes"


def group_or_world(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, or the whole world for None; what `dist.new_group` gives outsiders stays as it is."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise OptionError(
            "process_group=None means the whole world, and there is none yet: call"
            " torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup) and not outside(group):
        raise OptionError(
            f"process_group={group!r} must be a torch.distributed.ProcessGroup, or None for the whole world"
        )
    return group


def outside(group: object) -> bool:
    """Whether this is what a rank holds of a group that it is not in."""
    return bool(group == dist.GroupMember.NON_GROUP_MEMBER)


def node_name() -> str:
    """What ranks on the same node have in common: torchrun's GROUP_RANK, else the host's name."""
    node = os.environ.get("GROUP_RANK")
    return f"host {socket.gethostname()}" if node is None else f"GROUP_RANK {node}"


def ranks_on_node(meeting: Meeting, limit: timedelta) -> tuple[int, ...]:
    """The ranks on this rank's node, itself included, rising; all ranks of the meeting must ask.

    Nodes may have different numbers of ranks, in any order.
    """
    nodes = meeting.gather(_NODES, node_name(), limit)
    return tuple(rank for rank, node in enumerate(nodes) if node == nodes[meeting.rank])


@dataclass(frozen=True)
class Among:
    """Runs a program among some of the ranks, this one being one of them, as if there were no others."""

    program: Program
    ranks: tuple[int, ...]

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """The program's own collectives, each among these ranks."""
        place, size = self.ranks.index(bucket.rank), len(self.ranks)
        inner = self.program(replace(bucket, rank=place, world_size=size), memory)
        outcome = yield from among(self.ranks, inner)
        return outcome
