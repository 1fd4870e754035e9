"""Process groups as torch's modules accept them."""

import torch.distributed as dist

from thinwire.errors import OptionError


def group_or_world(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the given group, or the whole world for None.

    On a rank outside the group, torch's placeholder for it is returned unchanged.

    Raises:
        OptionError: It is not a process group, or it is None and torch.distributed is not initialised.
    """
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
    """Return True for torch's placeholder of a group that this rank is not in."""
    return bool(group == dist.GroupMember.NON_GROUP_MEMBER)
