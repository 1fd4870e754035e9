"""Models that `torch.compile` has wrapped train on the shadow device as plain ones do."""

import warnings
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters
from tests.shadow import device
from tests.shadow.device import SHADOW

WIDTH, LAYERS, STEPS = 512, 3, 4


class Net(nn.Module):
    """Layers of 1 MiB, the smallest buckets that dynamo's DDPOptimizer accepts.

    Without biases each gradient fills a bucket, so that buckets do not depend on the order of gradients.
    Dynamo does not trace the forward of a bare nn.Sequential inside DDP, hence a class.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Trained(NamedTuple):
    """The result of training on one rank."""

    parameters: torch.Tensor
    buckets: int
    races: list[str]
    breaks: dict[str, int]
    graphs: int


def trained(rank: int, program: Any, compiled: str) -> Trained:
    """Train with `torch.compile` "inside" DDP, "around" it, or without it."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    device.reset()
    net: Any = Net().to("shadow")
    ddp = DDP(torch.compile(net, backend="aot_eager") if compiled == "inside" else net, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, foreach=False)
    wire = None if program is None else thinwire.attach(ddp, program, optimizer=optimizer)
    model = torch.compile(ddp, backend="aot_eager") if compiled == "around" else ddp
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step, width=WIDTH).to("shadow")).square().mean().backward()
        optimizer.step()
    buckets = 0
    if wire is not None:
        last = wire.stats().last
        assert last is not None
        buckets = len({op.bucket for op in last.ops})
        wire.finalize()
    breaks, graphs = dict(counters["graph_break"]), counters["aot_autograd"]["ok"]
    return Trained(flat_parameters(net).cpu(), buckets, device.races(), breaks, graphs)


def compared(rank: int, world_size: int) -> dict[str, Trained]:
    warnings.simplefilter("ignore")  # dynamo's, of DDP's profiling
    found = {way: trained(rank, thinwire.Int8(), way) for way in ("eager", "inside", "around")}
    return {**found, "plain": trained(rank, None, "around")}


def test_compiled_models_train_to_the_same_weights() -> None:
    ranks = run_ranks(compared, 2, backend=SHADOW)
    eager = ranks[0]["eager"]
    for found in ranks:
        for way in ("eager", "inside", "around"):
            assert torch.equal(found[way].parameters, eager.parameters), way
            assert found[way].buckets == LAYERS, way
            assert found[way].races == [], way
        # DDPOptimizer cuts the graph where buckets end.
        assert [found[way].graphs for way in ("eager", "inside", "around")] == [0, LAYERS, LAYERS]
        assert found["inside"].breaks == {}
        assert found["around"].breaks == found["plain"].breaks, "thinwire adds no graph break to DDP's own"
