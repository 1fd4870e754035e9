"""How a torch-named hook, a bare function of (state, bucket), finds its DDP model and engine."""

import gc
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.bridge import Bridge, check_bucket, in_backward, parameters_of
from thinwire.errors import OptionError, UnavailableError
from thinwire.programs.memory import Memory
from thinwire.programs.program import Program
from thinwire.set_ups import set_up_of

_bridges: "weakref.WeakKeyDictionary[DistributedDataParallel, dict[dist.ProcessGroup, Bridge]]" = (
    weakref.WeakKeyDictionary()
)
_owners = WeakTensorKeyDictionary()  # parameter -> weak reference to its DDP model
_forwards: "weakref.WeakKeyDictionary[torch.nn.Module, int]" = weakref.WeakKeyDictionary()
"""How many forwards each known model has run since its last backward."""


def run_program(
    program: Program,
    process_group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over `process_group`; None is the group of the DDP model itself.

    (torch takes None for the whole world, so two jobs in one world average each other's gradients.)
    """
    return bridge_of(program, process_group, bucket).run(program, bucket, Memory())


def bridge_of(program: Program, process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Bridge:
    """The bridge of a bucket's DDP model over a group; the first call makes it, on all ranks together."""
    ddp = owner_of(bucket)
    group = ddp.process_group if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"the hook's state is {group!r}: it must be a process group that this rank is in, or None for the"
            " DDP model's own"
        )
    bridges = _bridges.setdefault(ddp, {})
    if group not in bridges:
        bridges[group] = Bridge(ddp, group, set_up_of(parameters_of(ddp), program))
    return bridges[group]


def owner_of(bucket: dist.GradBucket) -> DistributedDataParallel:
    """The DDP model whose gradients these are.

    DDP tells a hook nothing of itself, so it is looked for among all living objects, once; and again when a
    step begins that the known model has run no forward for: another one may own the parameters now.
    """
    check_bucket(bucket)
    parameter = bucket.parameters()[0]
    known = _owners.get(parameter)
    owner: DistributedDataParallel | None = known() if known is not None else None
    first = bucket.index() == 0 and in_backward()
    if owner is None or (first and not _forwards[owner]):
        owner = _find_owner(parameter)
        for own in owner.module.parameters():
            _owners[own] = weakref.ref(owner)
        if owner not in _forwards:
            owner.register_forward_pre_hook(_count_forward)
    if first or owner not in _forwards:
        _forwards[owner] = 0
    return owner


def _count_forward(model: torch.nn.Module, inputs: object) -> None:
    _forwards[model] = _forwards.get(model, 0) + 1


def _find_owner(parameter: torch.Tensor) -> DistributedDataParallel:
    owners = _living_owners(parameter)
    if len(owners) != 1:
        gc.collect()  # one that was dropped may be waiting to be collected
        owners = _living_owners(parameter)
    if len(owners) == 1:
        return owners[0]
    found = "no DDP model owns" if not owners else f"{len(owners)} DDP models with hooks own"
    raise UnavailableError(
        f"{found} this bucket's parameters, so the group to average over is unclear (gc.freeze() hides"
        " models; wrapping a module twice doubles them): use thinwire.attach(ddp, program) instead"
    )


def _living_owners(parameter: torch.Tensor) -> list[DistributedDataParallel]:
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [
        model
        for model in models
        if getattr(model, "_comm_hooks", None) and any(parameter is own for own in model.module.parameters())
    ]
