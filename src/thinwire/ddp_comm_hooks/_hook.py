"""What all hooks with torch's names share: the run of a bucket's DDP model, and an error for FSDP1.

A hook receives only (state, bucket), so its DDP model is searched for among all living objects. The model has
one run for each process group that hooks average over.
"""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.engine.comm.agreement import set_up_of
from thinwire.errors import OptionError, UnavailableError
from thinwire.models.ddp.internals import has_comm_hook
from thinwire.models.ddp.model import DDPModel, check_bucket, thinwire_hook
from thinwire.programs.description import described
from thinwire.programs.memory import Memory
from thinwire.programs.program import Program, Programs
from thinwire.step.autograd import in_backward
from thinwire.step.model import check_device
from thinwire.step.runner import AttachedRun, Choice, connect
from thinwire.step.strategy import Gradients, Stages

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_runs: "weakref.WeakKeyDictionary[DistributedDataParallel, dict[dist.ProcessGroup, AttachedRun]]" = (
    weakref.WeakKeyDictionary()
)
_owners = WeakTensorKeyDictionary()  # parameter -> weak reference to its DDP model
_forwards: "weakref.WeakKeyDictionary[torch.nn.Module, int]" = weakref.WeakKeyDictionary()
"""Number of forwards of each known model since its last backward."""


def for_ddp(hook: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a hook raise UnavailableError if FSDP1 calls it.

    FSDP1 accepts any callable as a hook. It calls it with a flat gradient instead of a bucket and, where it
    shards, with a third argument for the reduced shard.

    Args:
        hook: A hook for `DistributedDataParallel.register_comm_hook`.

    Returns:
        The hook, with the same name and signature.
    """

    @functools.wraps(hook)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if len(args) > 1 and isinstance(args[1], torch.Tensor):
            raise UnavailableError(
                f"{hook.__name__} takes DDP's buckets, and FSDP1 (FullyShardedDataParallel) called it with a"
                " flat gradient: register a hook that torch has for FSDP1, of"
                " torch.distributed.algorithms._comm_hooks.default_hooks; or shard with FSDP2,"
                " fully_shard(module, mesh=mesh['shard']), and compress between replicas with"
                " thinwire.attach(model, program, replicas=mesh['replicate'])"
            )
        return hook(*args, **kwargs)

    return checked


def run_program(
    program: Program,
    process_group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with a program, from inside a torch-named hook.

    Args:
        program: The program.
        process_group: The ranks to average over. None is the group of the DDP model itself. (torch takes None
            for the whole world, so two jobs in one world average each other's gradients.)
        bucket: The bucket that DDP passed to the hook.

    Returns:
        A future of the mean.
    """
    return thinwire_hook(run_of(program, process_group, bucket), bucket, Choice(Programs(program), Memory()))


def run_of(program: Program, process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> AttachedRun:
    """Return the run of a bucket's DDP model over a group.

    The first call makes it, which is collective. It compares no replicas, watches no optimizer and follows no
    schedule: hooks choose the program of each bucket.

    Raises:
        OptionError: `process_group` is not a process group that this rank is in.
        UnavailableError: The DDP model cannot be found.
    """
    ddp = owner_of(bucket)
    group = ddp.process_group if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise OptionError(
            f"the hook's state is {group!r}: it must be a process group that this rank is in, or None for the"
            " DDP model's own"
        )
    runs = _runs.setdefault(ddp, {})
    if group not in runs:
        model = DDPModel(ddp, group)
        check_device(model)
        connection = connect(model, set_up_of({}, described(program)))
        runs[group] = AttachedRun(model, connection, Stages({0: Gradients(program)}))
    return runs[group]


def owner_of(bucket: dist.GradBucket) -> DistributedDataParallel:
    """Return the DDP model that a bucket's gradients belong to.

    DDP passes no reference to itself to its hook, so the model is searched for among all living objects. The
    result is kept. The search is repeated when a step begins and the known model has run no forward for it,
    because another model may own the parameters now.

    Raises:
        UnavailableError: No DDP model owns the parameters, or several do.
    """
    check_bucket(bucket)
    parameter = bucket.parameters()[0]
    known = _owners.get(parameter)
    owner: DistributedDataParallel | None = known() if known is not None else None
    # A rank without inputs (Join) runs no forward for its buckets, so forwards say nothing about it.
    first = bucket.index() == 0 and in_backward()
    if owner is None or (first and not _forwards[owner]):
        owner = _found(parameter)
        if owner not in _forwards:
            owner.register_forward_pre_hook(torch.compiler.disable(_count_forward))
    if first or owner not in _forwards:
        _forwards[owner] = 0
    return owner


def _count_forward(model: torch.nn.Module, inputs: object) -> None:
    _forwards[model] = _forwards.get(model, 0) + 1


def owner_of_parameter(parameter: torch.Tensor) -> DistributedDataParallel:
    """Return the DDP model of a parameter under the Python reducer, which has no buckets."""
    known = _owners.get(parameter)
    owner: DistributedDataParallel | None = known() if known is not None else None
    if owner is None:
        owner = _found(parameter)
    return owner


def _found(parameter: torch.Tensor) -> DistributedDataParallel:
    owner = _find_owner(parameter)
    for own in owner.module.parameters():
        _owners[own] = weakref.ref(owner)
    return owner


def _find_owner(parameter: torch.Tensor) -> DistributedDataParallel:
    # Once per model: 0.1 s for 300,000 objects. Patching DDP at import would be faster, and would change it
    # for code that never uses thinwire.
    owners = _living_owners(parameter)
    if len(owners) != 1:
        gc.collect()  # a dropped model may not have been collected yet
        owners = _living_owners(parameter)
    if len(owners) == 1:
        return owners[0]
    found = "no DDP model owns" if not owners else f"{len(owners)} DDP models with hooks own"
    raise UnavailableError(
        f"{found} this bucket's parameters, so the group to average over is unclear (gc.freeze() hides"
        " models; wrapping a module twice doubles them): use thinwire.attach(ddp, program) instead"
    )


def _living_owners(parameter: torch.Tensor) -> list[DistributedDataParallel]:
    return [model for model in living_models() if any(parameter is own for own in model.module.parameters())]


def living_models() -> list[DistributedDataParallel]:
    """Return all DDP models that have a communication hook."""
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [model for model in models if has_comm_hook(model)]
