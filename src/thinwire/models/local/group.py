"""The process group of a model's replicas, from what the user gives to `attach`."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import OptionError


def replica_group(replicas: object) -> dist.ProcessGroup:
    """Return the process group of a model's replicas.

    Args:
        replicas: A process group that this rank is in, a mesh of one dimension, or None for all ranks.

    Raises:
        OptionError: It is none of these, or there are no ranks yet.
    """
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            names = replicas.mesh_dim_names
            one = names[0] if names else "replicate"
            raise OptionError(
                f"replicas={replicas!r} has {replicas.ndim} dimensions: give the one of the replicas, as"
                f" mesh[{one!r}]"
            )
        return replicas.get_group()
    group = dist.group.WORLD if replicas is None and dist.is_initialized() else replicas
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is None:
        raise OptionError(
            "there is no process group: call torch.distributed.init_process_group first, or give"
            " attach(..., replicas=group)"
        )
    raise OptionError(
        f"replicas={replicas!r} must be a torch.distributed.ProcessGroup that this rank is in, or a"
        " DeviceMesh of one dimension"
    )
