"""What torch's modules take for a process group."""

import torch.distributed as dist

from thinwire.errors import OptionError


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
