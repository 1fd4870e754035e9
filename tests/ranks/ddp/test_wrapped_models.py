"""Models as the training loop holds them: inside torch.compile, Fabric's wrapper, or `replicate`."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, equal, flat_parameters, mlp
from thinwire.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from thinwire.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from thinwire.models.ddp.unwrap import ddp_of

PROGRAMS = (
    thinwire.Int8(),
    thinwire.PowerSGD(rank=2, warmup=0),
    thinwire.DiLoCo(3, program=thinwire.Int8()),
    thinwire.ZeRO(thinwire.BF16()),
    thinwire.Schedule({0: thinwire.Exact(), 2: thinwire.LocalSGD(2), 5: thinwire.Int8()}),
)


class Net(nn.Module):
    """Matrices, vectors, buffers, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(self.norm(self.one(x)))
        return result


class Fabrics(nn.Module):
    """As Fabric's wrapper: the strategy's module, and the user's, which is inside of it."""

    def __init__(self, ddp: DDP) -> None:
        super().__init__()
        self._forward_module, self._original_module = ddp, ddp.module

    def forward(self, *args: Any) -> Any:
        return self._forward_module(*args)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


FORMS: dict[str, Any] = {
    "compile(ddp)": lambda net: compiled(DDP(net)),
    "ddp(compile)": lambda net: DDP(compiled(net)),
    "compile(fabric(compile(ddp)))": lambda net: compiled(Fabrics(compiled(DDP(net)))),
    "replicate": replicate,
}


def trained(rank: int, program: Any, wrap: Any, folder: str) -> tuple[dict[str, Any], Any, int]:
    """The model, the wire's state and the bytes of 4 steps, then a save and a load, then 4 more."""
    net = Net()
    model = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    wire = thinwire.attach(model, program, optimizer=optimizer, rules=[("norm.*", thinwire.Exact())])
    for step in range(8):
        if step == 4:
            thinwire.save_checkpoint(folder, model, optimizer, wire)
            thinwire.load_checkpoint(folder, model, optimizer, wire)
        optimizer.zero_grad()
        model(batch(rank, step, width=16)).square().mean().backward()
        optimizer.step()
    state = {key.replace("_orig_mod.", ""): one for key, one in net.state_dict().items()}
    return state, wire.state_dict(), wire.stats().bytes_sent


def every_form(rank: int, world_size: int, folder: str, program: Any) -> None:
    torch.compiler.set_stance("force_eager")  # what dynamo traces is tested in test_compiled.py
    averaged = isinstance(program, thinwire.Averaging)  # with the buffers, so that DDP broadcasts none
    expected, state, sent = trained(rank, program, DDP, f"{folder}/ddp")
    for form, wrap in FORMS.items():
        model, saved, bytes_sent = trained(rank, program, wrap, f"{folder}/{form}")
        for name in expected:
            broadcast = "running" in name and form == "replicate" and not averaged
            assert broadcast or torch.equal(model[name], expected[name]), (form, name)
        assert bytes_sent == sent, form
        if form != "replicate":  # its buffers differ: DDP broadcasts rank 0's, replicate leaves them alone
            assert equal(saved, state), form


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: type(one).__name__)
def test_wrapped_models_train_and_resume_as_the_ddp_model_inside(program: Any, tmp_path: Any) -> None:
    run_ranks(every_form, 2, str(tmp_path), program)


def traced(rank: int, world_size: int, program: Any) -> None:
    """Dynamo compiles for real, also through the swaps of a schedule."""
    warnings.simplefilter("ignore")  # dynamo's, of DDP's profiling
    forms = {**FORMS, "compile(replicate)": lambda net: compiled(replicate(net))}
    results = {}
    for form, wrap in {"ddp": DDP, **forms}.items():
        torch._dynamo.reset()
        net = mlp(width=16, layers=2)
        model, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.05)
        wire = thinwire.attach(model, program, optimizer=optimizer)
        for step in range(8):
            optimizer.zero_grad()
            model(batch(rank, step, width=16)).square().mean().backward()
            optimizer.step()
        assert wire.step == 8, form
        results[form] = flat_parameters(net)
    assert all(torch.equal(one, results["ddp"]) for one in results.values())


@pytest.mark.slow
def test_wrapped_models_train_the_same_when_dynamo_traces_them() -> None:
    run_ranks(traced, 2, PROGRAMS[-1])


FSDP1 = r"FSDP1 shards flat parameters.*fully_shard.*replicas=mesh\['replicate'\].*thinwire\.ZeRO\(\)"


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP's, of CPUs
        return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), sharding_strategy=strategy)


def hooked_fsdp1(rank: int, world_size: int) -> list[str]:
    """Every DDP hook on FSDP1 models, which calls them with one tensor, or with two where it shards."""
    said = []
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        for state, hook in (
            (None, default_hooks.allreduce_hook),
            (None, default_hooks.fp16_compress_hook),
            (None, default_hooks.bf16_compress_hook),
            (None, default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook)),
            (None, debugging_hooks.noop_hook),
            (None, quantization_hooks.quantization_pertensor_hook),
            (None, quantization_hooks.quantization_perchannel_hook),
            (powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook),
            (powerSGD_hook.PowerSGDState(None), powerSGD_hook.batched_powerSGD_hook),
            (PostLocalSGDState(None, None, 1), post_localSGD_hook),
        ):
            model = fsdp1(strategy)
            model.register_comm_hook(state, hook)
            warnings.simplefilter("ignore")  # FSDP's, of CPUs
            with pytest.raises(thinwire.UnavailableError) as caught:
                model(torch.ones(2, 16)).sum().backward()
            said.append(str(caught.value))
    return said


def test_hooks_of_ddp_on_fsdp1_say_what_works_instead() -> None:
    for said in run_ranks(hooked_fsdp1, 2):
        for text in said:
            assert "FSDP1 (FullyShardedDataParallel) called it" in text
            assert "fully_shard" in text
            assert "replicas=mesh['replicate']" in text


def refused(rank: int, world_size: int) -> None:
    class FSDPModule(Net):
        pass

    class DeepSpeedEngine(Net):
        pass

    for model, message in (
        (Net(), r"not a Net: wrap it with torch\.nn\.parallel\.DistributedDataParallel\(model\) first"),
        (DataParallel(Net()), "runs in one process and sends nothing: use DistributedDataParallel"),
        (FSDPModule(), r"FSDP shards parameters.* use DDP, or thinwire\.ZeRO\(\)"),
        (fsdp1(), FSDP1),
        (nn.Sequential(fsdp1(), nn.Linear(4, 4)), FSDP1),
        (DeepSpeedEngine(), r"DeepSpeed exchanges gradients itself.* use DDP"),
        (compiled(Net()), "not a OptimizedModule: wrap it"),
    ):
        with pytest.raises(thinwire.AttachError, match=message):
            thinwire.attach(model, thinwire.Int8())
    for program in (thinwire.Int8(), thinwire.DiLoCo(period=8)):
        for model in (fsdp1(), nn.Sequential(fsdp1())):
            with pytest.raises(thinwire.AttachError, match=FSDP1):
                thinwire.attach(model, program, replicas=dist.group.WORLD)
    meshed = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2,))
    meshed.weight = nn.Parameter(distribute_tensor(meshed.weight.detach(), mesh))
    with pytest.raises(thinwire.AttachError, match=r"DTensors of a device mesh.* use plain DDP"):
        thinwire.attach(meshed, thinwire.Int8())
    net = replicate(Net())
    assert ddp_of(net) is ddp_of(net), "made once"


def test_what_is_not_ddp_is_refused_with_the_way_out() -> None:
    run_ranks(refused, 2)
