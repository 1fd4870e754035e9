"""torch's counterparts of thinwire's programs and strategies: hooks and optimizers."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import thinwire
from thinwire.tools.bench.devices import device

MakeOptimizer: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], Optimizer]
ONE_BUCKET_MB = 100_000.0


@dataclass(frozen=True)
class Counterpart:
    """torch's counterpart of a program or a strategy.

    Attributes:
        name: A function from the program to the name in torch, with its main options.
        prepare: Sets up a model with the program's options, and returns the optimizer to step.
        bucket_mb: The bucket size that it needs to run at all. None for DDP's default.
    """

    name: Callable[[Any], str]
    prepare: Callable[[DDP, Any, MakeOptimizer], Optimizer]
    bucket_mb: float | None = None


def hook_counterpart(
    name: Callable[[Any], str], register: Callable[[DDP, Any], None], bucket_mb: float | None = None
) -> Counterpart:
    """Return a counterpart that is a communication hook and does not change the optimizer.

    Args:
        name: A function from the program to the hook's name in tables.
        register: Registers the hook on a model, with the program's options.
        bucket_mb: The bucket size that the hook needs to run at all.
    """

    def prepare(ddp: DDP, program: Any, make: MakeOptimizer) -> Optimizer:
        register(ddp, program)
        return make(ddp.parameters())

    return Counterpart(name, prepare, bucket_mb)


def _simple(choose: Callable[[], Callable[..., Any]]) -> Counterpart:
    return hook_counterpart(
        lambda program: choose().__name__,
        lambda ddp, program: ddp.register_comm_hook(ddp.process_group, choose()),
    )


def _half_precision() -> Callable[..., Any]:
    """Return torch's bf16 hook, or its fp16 hook on CPUs, where DDP rejects the former."""
    on_cpu = device().type == "cpu"
    return torch_hooks.fp16_compress_hook if on_cpu else torch_hooks.bf16_compress_hook


def _powersgd_name(program: thinwire.PowerSGD) -> str:
    return f"{'batched_' * program.flatten}powerSGD_hook rank {program.rank}"


def _register_powersgd(ddp: DDP, program: thinwire.PowerSGD) -> None:
    hook = torch_powersgd.batched_powerSGD_hook if program.flatten else torch_powersgd.powerSGD_hook
    state = torch_powersgd.PowerSGDState(
        ddp.process_group,
        program.rank,
        start_powerSGD_iter=2,
        min_compression_rate=program.min_compression,
        use_error_feedback=program.error_feedback,
        warm_start=program.warm_start,
    )
    ddp.register_comm_hook(state, hook)


def _post_local_sgd(ddp: DDP, program: thinwire.LocalSGD, make: MakeOptimizer) -> Optimizer:
    """Set up torch's post-local SGD. It needs a subgroup on CPUs, even if it never uses it."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # slow to import, with a warning

    group = ddp.process_group
    state = torch_local_sgd.PostLocalSGDState(
        group, group, program.warmup_steps, post_local_gradient_allreduce=False
    )
    ddp.register_comm_hook(state, torch_local_sgd.post_localSGD_hook)
    averager = PeriodicModelAverager(program.period, program.warmup_steps, group)
    return PostLocalSGDOptimizer(make(ddp.parameters()), averager)


def _zero(ddp: DDP, program: thinwire.ZeRO, make: MakeOptimizer) -> Optimizer:
    """Set up torch's ZeRO with the class and the options of the workload's optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    made = make(ddp.parameters())
    if len(made.param_groups) != 1:
        raise ValueError("the optimizer has several parameter groups, which cannot be made from its class")
    accepted = inspect.signature(type(made)).parameters
    options = {name: value for name, value in made.defaults.items() if name in accepted}
    return ZeroRedundancyOptimizer(
        ddp.parameters(),
        type(made),
        process_group=ddp.process_group,
        parameters_as_bucket_view=True,
        **options,
    )


COUNTERPARTS: dict[str, Counterpart] = {
    "Exact": _simple(lambda: torch_hooks.allreduce_hook),
    "FP16": _simple(lambda: torch_hooks.fp16_compress_hook),
    "BF16": _simple(_half_precision),
    "PowerSGD": hook_counterpart(_powersgd_name, _register_powersgd, ONE_BUCKET_MB),
    "LocalSGD": Counterpart(
        lambda program: f"PostLocalSGDOptimizer period {program.period}", _post_local_sgd
    ),
    "ZeRO": Counterpart(lambda program: "ZeroRedundancyOptimizer", _zero),
}
"""torch's counterparts by the public names of thinwire's programs and strategies.

torch's quantization hooks do not run on Gloo. benchmarks/hooks.py repairs them.
"""
