"""How a torch-named hook, a bare function of (state, bucket), finds its DDP model and engine."""

import gc
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.bridge import Bridge, check_bucket, set_up_of
from thinwire.errors import OptionError, UnavailableError
from thinwire.programs.program import Memory, Program

_bridges: "weakref.WeakKeyDictionary[DistributedDataParallel, dict[dist.ProcessGroup, Bridge]]" = (
    weakref.WeakKeyDictionary()
)
_owners = WeakTensorKeyDictionary()  # parameter -> weak reference to its DDP model


def run_program(
    program: Program, process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over `process_group`; None is the group of the DDP model itself.

    (torch takes None for the whole world, so two jobs in one world average each other's gradients.)
    """
    ddp = owner_of(bucket)
    group = ddp.process_group if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"the hook's state is a {type(group).__name__}: it must be a process group, or None for the"
            " DDP model's own"
        )
    bridges = _bridges.setdefault(ddp, {})
    if group not in bridges:
        bridges[group] = Bridge(ddp, group, set_up_of(ddp, program))
    return bridges[group].run(program, bucket, Memory())


def owner_of(bucket: dist.GradBucket) -> DistributedDataParallel:
    """The DDP model whose gradients these are.

    DDP tells a hook nothing of itself, so it is looked for once, among all living objects.
    """
    check_bucket(bucket)
    parameter = bucket.parameters()[0]
    known = _owners.get(parameter)
    owner: DistributedDataParallel | None = known() if known is not None else None
    if owner is None:
        owner = _find_owner(parameter)
        _owners[parameter] = weakref.ref(owner)
    return owner


def _find_owner(parameter: torch.Tensor) -> DistributedDataParallel:
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    owners: list[DistributedDataParallel] = [
        model
        for model in models
        if model._comm_hooks and any(parameter is own for own in model.module.parameters())
    ]
    if len(owners) == 1:
        return owners[0]
    found = "no DDP model" if not owners else f"{len(owners)} DDP models with hooks"
    raise UnavailableError(
        f"{found} own this bucket's parameters, so the group to average over is unclear (gc.freeze() hides"
        " models; wrapping a module twice doubles them): use thinwire.attach(ddp, program) instead"
    )
