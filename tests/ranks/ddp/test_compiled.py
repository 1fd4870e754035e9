"""Models that `torch.compile` has wrapped, inside DDP and around it."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, equal, flat_gradients, flat_parameters, mlp, own
from thinwire.checkpoint.dcp import read_model
from thinwire.checkpoint.trees import copied
from thinwire.ddp_comm_hooks._python_reducer import _only_group
from thinwire.ddp_comm_hooks.debugging_hooks import noop_hook
from thinwire.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from thinwire.telemetry import watch


class Normed(nn.Module):
    """Matrices, vectors and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class Job:
    """A model, compiled or not, its optimizer and a wire."""

    def __init__(self, program: Any, compiled: bool) -> None:
        model = Normed()
        self.ddp = DDP(torch.compile(model, backend="eager") if compiled else model, bucket_cap_mb=0.001)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        self.wire = thinwire.attach(self.ddp, program, optimizer=self.optimizer)
        self.model = model

    def train(self, rank: int, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.ddp(batch(rank, step, width=16)).square().mean().backward()
            self.optimizer.step()


def checkpointed(rank: int, world_size: int, folder: str) -> None:
    torch.compiler.set_stance("force_eager")  # names are what matters here
    warnings.simplefilter("ignore")  # DCP's
    for compiled in (False, True):
        first = Job(thinwire.Int8(), compiled)
        first.train(rank, 0, 3)
        saved = first.ddp, first.optimizer, first.wire
        path = str(thinwire.save_checkpoint(f"{folder}/{compiled}", *saved))
        parts = {"model": first.ddp.module.state_dict(), "optimizer": thinwire.PerRank(first.optimizer)}
        extra: dict[str, Any] = {f"rank {rank} of 2": ({},)}
        dcp.save({**parts, "wire": first.wire, "extra": extra}, checkpoint_id=f"{folder}/dcp {compiled}")
        first.train(rank, 3, 6)
        job = Job(thinwire.Int8(), not compiled)
        thinwire.load_checkpoint(path, job.ddp, job.optimizer, job.wire)
        job.train(rank, 3, 6)
        assert torch.equal(flat_parameters(job.model), flat_parameters(first.model))
        other = Job(thinwire.Exact(), not compiled)
        model = read_model(f"{folder}/dcp {compiled}", other.ddp.module, {})
        other.ddp.module.load_state_dict(model)
        assert torch.equal(other.model.state_dict()["layers.0.weight"], saved_weight(path))


def saved_weight(path: str) -> torch.Tensor:
    """The weight under its original name, for a model without thinwire."""
    state = {"model": {"layers.0.weight": torch.empty(16, 16)}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state["model"]["layers.0.weight"]


@pytest.mark.slow
def test_a_checkpoint_of_a_compiled_model_loads_into_a_plain_one_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    run_ranks(checkpointed, 2, str(tmp_path))


def resumed(rank: int, world_size: int, program: Any) -> None:
    torch.compiler.set_stance("force_eager")  # names are what matters here
    first = Job(program, compiled=True)
    first.train(rank, 0, 3)
    state = first.wire.state_dict()
    assert "_orig_mod" not in repr(own(state))
    model, moments = copied(first.model.state_dict()), copied(first.optimizer.state_dict())
    first.train(rank, 3, 6)
    for compiled in (False, True):
        job = Job(program, compiled)
        job.model.load_state_dict(model)
        job.optimizer.load_state_dict(copied(moments))
        job.wire.load_state_dict(state)
        job.train(rank, 3, 6)
        assert equal(job.wire.state_dict(), first.wire.state_dict())
        assert equal(job.model.state_dict(), first.model.state_dict())


@pytest.mark.parametrize(
    "program",
    [
        thinwire.Int8(),
        thinwire.DiLoCo(4, program=thinwire.Int4(), overlap=1),
        thinwire.ZeRO(thinwire.Int8(), parameters=torch.bfloat16),
    ],
    ids=["Int8", "DiLoCo", "ZeRO"],
)
def test_states_of_compiled_and_plain_models_are_one(program: Any) -> None:
    run_ranks(resumed, 2, program)


SCHEDULE = thinwire.Schedule({0: thinwire.Exact(), 2: thinwire.DiLoCo(2), 5: thinwire.Int8()})


class Rows(list[Any]):
    """A sink."""

    def write(self, row: Any) -> None:
        self.append(row)

    def close(self) -> None:
        pass


def trained(
    rank: int, program: Any, *, compiled: bool, watched: bool = False
) -> tuple[torch.Tensor, dict[str, int]]:
    """What training leads to, and what breaks dynamo's graph how often."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ddp = DDP(mlp(width=16, layers=2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    wire = None if program is None else thinwire.attach(ddp, program, optimizer=optimizer)
    rows = Rows()
    with contextlib.ExitStack() as stack:
        if watched and wire is not None:
            stack.enter_context(watch(ddp, wire, rows, ranks="all"))
        model = torch.compile(ddp, backend="eager") if compiled else ddp
        for step in range(8):
            optimizer.zero_grad()
            model(batch(rank, step, width=16)).square().mean().backward()
            optimizer.step()
    if watched:
        assert [row["step"] for row in rows if row["purpose"] == "gradients"][-1] == 7
    return flat_parameters(ddp.module), dict(torch._dynamo.utils.counters["graph_break"])


def compiled_around(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")  # dynamo's, of DDP's profiling
    expected, _ = trained(rank, SCHEDULE, compiled=False, watched=True)
    parameters, _ = trained(rank, SCHEDULE, compiled=True, watched=True)
    assert torch.equal(parameters, expected)
    _, plain = trained(rank, None, compiled=True)
    _, breaks = trained(rank, thinwire.DiLoCo(4), compiled=True)
    ours = [count for reason, count in breaks.items() if "Model.on_forward" in reason]
    assert ours == [1], "our forward hook is one break"
    assert len(breaks.keys() - plain.keys()) == 1, "dynamo does not look into it"


@pytest.mark.slow
def test_a_compiled_ddp_runs_schedules_and_telemetry_untraced() -> None:
    run_ranks(compiled_around, 2)


def gradients(
    rank: int, hook: Any, state: Any = None, reducer: Any = "python_reducer", compiled: bool = True, **kw: Any
) -> torch.Tensor:
    """The second step's gradients, forward and backward compiled in full or not at all."""

    def whole(graph: Any) -> Any:
        return torch.compile(graph, fullgraph=True, backend="eager")

    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=reducer):
        ddp = DDP(mlp(width=8, layers=1), **kw)
        if hook is not None:
            ddp.register_comm_hook(state, hook)
        for step in range(2):
            ddp.zero_grad()
            with compiled_autograd._enable(whole) if compiled else contextlib.nullcontext():
                (whole(ddp) if compiled else ddp)(batch(rank, step, width=8)).square().mean().backward()
    return flat_gradients(ddp.module)


def python_reducer(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")  # dynamo's
    for hook, state in (
        (fp16_compress_hook, None),
        (bf16_compress_hook, None),
        (allreduce_hook, dist.group.WORLD),
    ):
        assert torch.equal(gradients(rank, hook, state), gradients(rank, hook, None, True, False))
    for other in (bf16_compress_hook, noop_hook):
        expected = gradients(rank, other, None, True, False)
        assert torch.equal(gradients(rank, other, compiled=False), expected)
    with pytest.raises(Exception, match=r"UnavailableError.*Python reducer has no buckets; set"):
        gradients(rank, powerSGD_hook, PowerSGDState(None))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = DDP(mlp(width=8))
    with pytest.raises(thinwire.UnavailableError, match=r"Python reducer has no buckets; set"):
        thinwire.attach(ddp, thinwire.Int8())


def test_hooks_of_one_collective_work_with_the_python_reducer() -> None:
    run_ranks(python_reducer, 2)


def python_reducer_by_group(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")  # dynamo's
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    own_gradients = gradients(rank, None, None, True, False, process_group=alone)
    assert torch.equal(gradients(rank, allreduce_hook, process_group=alone), own_gradients)
    assert not torch.equal(gradients(rank, allreduce_hook, compiled=False), own_gradients)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        models = [DDP(mlp(width=8, layers=1), process_group=one) for one in (alone, dist.group.WORLD)]
    for model in models:
        model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(thinwire.UnavailableError, match=r"span 2 process groups, .* as the hook's state"):
        _only_group()  # which dynamo calls as it traces


@pytest.mark.slow
def test_the_python_reducers_group_is_the_models_own() -> None:
    run_ranks(python_reducer_by_group, 2)
