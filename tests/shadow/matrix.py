"""Set-ups of training that run on the CPU and on the shadow device, to be compared.

Both runs are in one process of each rank, on the same data. Gradients have the same bits on both, because the
shadow device computes with torch's CPU kernels. thinwire takes different ways: native kernels and the wire
thread on the CPU, torch's operations and the inline engine on a device.
"""

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import quiet
from tests.shadow import device
from thinwire.ddp_comm_hooks import default_hooks, optimizer_overlap_hooks, powerSGD_hook, quantization_hooks
from thinwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from thinwire.optim import ZeroRedundancyOptimizer

WIDTH = 24
STEPS = 5
BUCKETS = 0.004


class Net(nn.Module):
    """Layers of several sizes, statistics that DDP broadcasts, and a layer that some steps do not use."""

    def __init__(self, *, detours: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.gain = nn.Parameter(torch.ones(2 * WIDTH))
        if detours:
            self.detour = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, 7)

    def forward(self, x: torch.Tensor, detour: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.relu(self.norm(self.first(x)))) * self.gain)
        result: torch.Tensor = self.last(self.detour(hidden) if detour else hidden)
        return result.float().square().mean()


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A model, what is attached to it, and the way it trains.

    Args:
        program: The second argument of attach. None attaches nothing.
        options: Further arguments of attach.
        ddp: Further arguments of DistributedDataParallel.
        hook: Registers a communication hook with torch's name, or another optimizer, on a job.
        way: Trains a job; returns the one whose parameters are compared.
        dtype: The dtype of the parameters.
        micro_batches: The number of backward passes in a step, all but the last without synchronisation.
        scaled: Whether a GradScaler scales the loss.
        detours: Whether a layer is used in every other step only, by one rank or the other.
        world_size: The number of ranks.
        close: The largest difference from the CPU's numbers; 0 asks for the same bits.
    """

    program: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: Callable[["Job"], None] | None = None
    way: Callable[["Job"], "Job"] | None = None
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    scaled: bool = False
    detours: bool = False
    world_size: int = 2
    close: float = 0.0


class Job:
    """One rank's training."""

    def __init__(self, set_up: SetUp, where: str, rank: int, buckets: float = BUCKETS) -> None:
        self.set_up, self.where, self.rank = set_up, where, rank
        self.model = self.wrapped(Net(detours=set_up.detours).to(set_up.dtype).to(where), buckets)
        # Only devices have `foreach`, which rounds bf16 differently.
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, foreach=False)
        self.scaler = torch.amp.GradScaler(
            where, init_scale=2.0**10, growth_interval=2, enabled=set_up.scaled
        )
        self.wire: Any = None
        if set_up.program is not None:
            self.wire = self.attached(set_up.program)
        if set_up.hook is not None:
            set_up.hook(self)

    def wrapped(self, net: Net, buckets: float) -> Any:
        return DDP(net, bucket_cap_mb=buckets, **self.set_up.ddp)

    def attached(self, program: Any, **options: Any) -> thinwire.Wire:
        options = {"scaler": self.scaler, **self.set_up.options, **options}
        return thinwire.attach(self.model, program, optimizer=self.optimizer, **options)

    def train(self, first: int = 0, last: int = STEPS) -> "Job":
        for step in range(first, last):
            self.step(step)
        return self

    def step(self, step: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        micro_batches = self.set_up.micro_batches
        for micro in range(micro_batches):
            with contextlib.nullcontext() if micro + 1 == micro_batches else self.model.no_sync():
                loss = self.model(
                    self.batch(micro_batches * step + micro),
                    **({"detour": (step + self.rank) % 2 == 0} if self.set_up.detours else {}),
                )
                self.scaler.scale(loss * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def batch(self, number: int) -> torch.Tensor:
        data = torch.Generator().manual_seed(1000 * number + self.rank)
        return torch.randn(6, WIDTH, generator=data).to(self.set_up.dtype).to(self.where)

    def parameters(self) -> torch.Tensor:
        return flat(self.model.parameters())


def flat(tensors: Iterable[Any]) -> torch.Tensor:
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in whole])


class Sharded(Job):
    """FSDP2 with a wire between replicas: two replicas of one shard, or of two."""

    def wrapped(self, net: Net, buckets: float) -> Any:
        shards = dist.get_world_size() // 2
        self.mesh = init_device_mesh(self.where, (2, shards), mesh_dim_names=("replicate", "shard"))
        for layer in (net.first, net.second):
            fully_shard(layer, mesh=self.mesh["shard"])
        return fully_shard(net, mesh=self.mesh["shard"])

    def attached(self, program: Any, **options: Any) -> thinwire.Wire:
        return super().attached(program, replicas=self.mesh["replicate"], **options)


# Ways to train


def uneven(job: Job) -> Job:
    """Rank 0 runs out of inputs, and shadows the others' collectives."""
    with Join([job.model]):
        return job.train(last=3 if job.rank == 0 else STEPS)


def overflowing(job: Job) -> Job:
    """One rank's gradients are infinite in one step."""
    job.train(last=2)
    job.step(2, factor=math.inf if job.rank == 1 else 1.0)
    return job.train(3)


def swapped(job: Job) -> Job:
    job.train(last=2)
    job.wire.swap(thinwire.Int4())
    job.train(2, 3)
    job.wire.swap(thinwire.PowerSGD(rank=2, warmup=0))
    return job.train(3)


def resumed(job: Job) -> Job:
    """A new model with other buckets continues from the states of the old one."""
    job.train(last=3)
    again = type(job)(job.set_up, job.where, job.rank, buckets=2 * BUCKETS)
    states = copy.deepcopy([part.state_dict() for part in (job.model, job.optimizer, job.wire)])
    for part, state in zip((again.model, again.optimizer, again.wire), states, strict=True):
        part.load_state_dict(state)
    return again.train(3)


def checkpointed(job: Job) -> Job:
    """The same by save_checkpoint and load_checkpoint."""
    job.train(last=3)
    again = type(job)(job.set_up, job.where, job.rank)
    folder = [tempfile.mkdtemp() if job.rank == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    thinwire.save_checkpoint(f"{folder[0]}/saved", job.model, job.optimizer, job.wire)
    thinwire.load_checkpoint(f"{folder[0]}/saved", again.model, again.optimizer, again.wire)
    return again.train(3)


# Hooks with torch's names


def commonly(hook: Any, state: Callable[[], Any] = lambda: None) -> Callable[[Job], None]:
    def register(job: Job) -> None:
        job.model.register_comm_hook(state(), hook)

    return register


def zero_redundancy(hook: Any = None, **options: Any) -> Callable[[Job], None]:
    """An optimizer in shards, with torch's name; with `hook` it steps inside backward."""

    def register(job: Job) -> None:
        job.optimizer = ZeroRedundancyOptimizer(
            job.model.parameters(), torch.optim.SGD, overlap_with_ddp=hook is not None, lr=0.05, **options
        )
        if hook is not None:
            made = hook(default_hooks.allreduce_hook, job.model, job.optimizer)
            job.model.register_comm_hook(None, made)

    return register


def optimizer_in_backward(job: Job) -> None:
    optimizer_overlap_hooks.register_optimizer_overlap(job.model, job.optimizer)


PARTS = [("second.weight", thinwire.BF16()), ("first.bias", thinwire.Exact())]
"""Rules that cut buckets into parts, so that one bucket's means come from several exchanges."""

CORE: dict[str, SetUp] = {
    "plain DDP": SetUp(),
    "Exact": SetUp(program=thinwire.Exact()),
    "BF16": SetUp(program=thinwire.BF16()),
    "Int8": SetUp(program=thinwire.Int8()),
    "Int8, three ranks": SetUp(program=thinwire.Int8(), world_size=3),
    "Int2": SetUp(program=thinwire.Int2()),
    "TopK": SetUp(program=thinwire.TopK(0.05)),
    "RandomK": SetUp(program=thinwire.RandomK(0.05)),
    "PowerSGD": SetUp(program=thinwire.PowerSGD(rank=2, warmup=0), close=1e-4),
    "rules": SetUp(program=thinwire.Int8(), options={"rules": PARTS}),
    "rules, bf16": SetUp(program=thinwire.Int8(), options={"rules": PARTS}, dtype=torch.bfloat16),
    "no_sync": SetUp(program=thinwire.Int8(), micro_batches=2),
    "find_unused_parameters": SetUp(
        program=thinwire.Int8(), ddp={"find_unused_parameters": True}, detours=True
    ),
    "gradient_as_bucket_view": SetUp(program=thinwire.Int8(), ddp={"gradient_as_bucket_view": True}),
    "GradScaler": SetUp(program=thinwire.Int8(), scaled=True, way=overflowing),
    "Join": SetUp(program=thinwire.Int8(), way=uneven, options={"check_every": 2, "rules": PARTS}),
    "audits and comparisons": SetUp(program=thinwire.Int8(), options={"check_every": 2, "audit_every": 2}),
    "swap": SetUp(program=thinwire.Exact(), way=swapped, close=1e-4),
    "resume": SetUp(program=thinwire.Int4(), way=resumed),
    "LocalSGD": SetUp(program=thinwire.LocalSGD(period=2)),
    "DiLoCo, overlap": SetUp(program=thinwire.DiLoCo(3, program=thinwire.Int4(), fragments=2, overlap=1)),
    "ZeRO": SetUp(program=thinwire.ZeRO(thinwire.Int8())),
    "ZeRO, interleaved": SetUp(program=thinwire.ZeRO(interleaved=True)),
    "FSDP2": SetUp(program=thinwire.Int8(), options={"check_every": 2}),
    "powerSGD_hook": SetUp(
        hook=commonly(
            powerSGD_hook.powerSGD_hook,
            lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
        ),
        close=1e-4,
    ),
}

MORE: dict[str, SetUp] = {
    "FP16": SetUp(program=thinwire.FP16()),
    "Int4": SetUp(program=thinwire.Int4()),
    "Int4, stochastic": SetUp(program=thinwire.Int4(stochastic=True)),
    "FP8": SetUp(program=thinwire.FP8()),
    "Sign": SetUp(program=thinwire.Sign()),
    "Sign, three ranks": SetUp(program=thinwire.Sign(), world_size=3),
    "a rank without pieces": SetUp(
        program=thinwire.TwoShot(thinwire.Quantize(bits=8, block=65536)), world_size=3
    ),
    "PowerSGD, warm-up": SetUp(program=thinwire.PowerSGD(rank=2, warmup=2), close=1e-4),
    "PowerSGD int8": SetUp(program=thinwire.PowerSGD(rank=2, factor_dtype="int8", warmup=0), close=1e-2),
    "PowerSGD flatten": SetUp(program=thinwire.PowerSGD(rank=1, flatten=True, warmup=0), close=1e-4),
    "Warmup": SetUp(program=thinwire.Warmup(thinwire.Int4(), steps=3)),
    "Partition": SetUp(program=thinwire.Partition([("*.bias", thinwire.Exact())], default=thinwire.Int4())),
    "AcrossNodes": SetUp(program=thinwire.AcrossNodes(thinwire.Int8(), node_size=1)),
    "AcrossNodes, four ranks": SetUp(
        program=thinwire.AcrossNodes(thinwire.Int8(), node_size=2), world_size=4
    ),
    "Exact, three ranks": SetUp(program=thinwire.Exact(), world_size=3),
    "rules, PowerSGD": SetUp(
        program=thinwire.PowerSGD(rank=2, warmup=0),
        options={"rules": PARTS},
        dtype=torch.bfloat16,
        close=5e-2,
    ),
    "static_graph": SetUp(program=thinwire.Int8(), ddp={"static_graph": True}),
    "bf16": SetUp(program=thinwire.Int8(), dtype=torch.bfloat16),
    "bf16, PowerSGD": SetUp(program=thinwire.PowerSGD(rank=2, warmup=0), dtype=torch.bfloat16, close=5e-2),
    "GradScaler, Exact": SetUp(program=thinwire.Exact(), scaled=True, way=overflowing),
    "skip_overflows": SetUp(program=thinwire.Int8(), way=overflowing, options={"skip_overflows": True}),
    "Join, three ranks": SetUp(program=thinwire.Int8(), way=uneven, world_size=3),
    "audits, GradScaler": SetUp(
        program=thinwire.Int4(), scaled=True, options={"check_every": 1, "audit_every": 1}
    ),
    "Schedule": SetUp(
        program=thinwire.Schedule(
            {0: thinwire.Exact(), 1: thinwire.Int4(), 2: thinwire.LocalSGD(period=2), 4: thinwire.Int8()}
        )
    ),
    "save_checkpoint": SetUp(program=thinwire.Int4(), way=checkpointed),
    "Hierarchical": SetUp(program=thinwire.Hierarchical({2: None}, gradients=thinwire.Int4())),
    "DiLoCo": SetUp(program=thinwire.DiLoCo(2, program=thinwire.Int4())),
    "DiLoCo, resume": SetUp(program=thinwire.DiLoCo(2, overlap=1), way=resumed),
    "SparseLoCo": SetUp(program=thinwire.SparseLoCo(2)),
    "ZeRO, GradScaler": SetUp(program=thinwire.ZeRO(thinwire.Int8()), scaled=True, way=overflowing),
    "ZeRO, PowerSGD": SetUp(program=thinwire.ZeRO(thinwire.PowerSGD(rank=2, warmup=0)), close=1e-4),
    "ZeRO, bf16 parameters": SetUp(
        program=thinwire.ZeRO(thinwire.BF16(), parameters=torch.bfloat16), world_size=3
    ),
    "FSDP2, DiLoCo": SetUp(program=thinwire.DiLoCo(2, program=thinwire.Int8(), overlap=1)),
    "HSDP": SetUp(program=thinwire.Int8(), options={"check_every": 2}, world_size=4),
    "bf16_compress_hook": SetUp(hook=commonly(default_hooks.bf16_compress_hook)),
    "fp16_compress_wrapper": SetUp(
        hook=commonly(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    ),
    "quantization_perchannel_hook": SetUp(
        hook=commonly(quantization_hooks.quantization_perchannel_hook, lambda: dist.group.WORLD)
    ),
    "ZeroRedundancyOptimizer": SetUp(hook=zero_redundancy(momentum=0.9)),
    "hook_with_zero_step": SetUp(hook=zero_redundancy(hook_with_zero_step)),
    "hook_with_zero_step_interleaved": SetUp(hook=zero_redundancy(hook_with_zero_step_interleaved)),
    "register_optimizer_overlap": SetUp(hook=optimizer_in_backward),
}
SET_UPS = CORE | MORE


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Args:
        parameters: The parameters after training on the shadow device.
        difference: The largest difference of a parameter or buffer from training on the CPU.
        races: The races on the shadow device.
    """

    parameters: torch.Tensor
    difference: float
    races: list[str]


def run(rank: int, world_size: int, name: str) -> Found:
    """Train a set-up on the CPU, then on the shadow device."""
    on_cpu = trained(name, "cpu", rank)
    device.reset()
    on_shadow = trained(name, "shadow", rank)
    difference = max(float((own - other).abs().max()) for own, other in zip(on_shadow, on_cpu, strict=True))
    return Found(on_shadow[0], difference, device.races())


def trained(name: str, where: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters and the buffers after training, on the CPU."""
    set_up = SET_UPS[name]
    # oneDNN has layers of its own for bf16 on the CPU, with other roundings than the operations of a device.
    with quiet(), torch.backends.mkldnn.flags(enabled=False):
        job = (Sharded if name.startswith(("FSDP2", "HSDP")) else Job)(set_up, where, rank)
        done = set_up.way(job) if set_up.way else job.train()
    if done.wire is not None:
        done.wire.finalize()
    return done.parameters(), flat(done.model.buffers())
