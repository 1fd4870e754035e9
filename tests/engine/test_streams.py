"""The inline engine of accelerators, checked against a model of streams, events, futures and memory.

No accelerator is needed: what torch would put on streams is recorded, operation by operation.
"""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire
from tests.streams import Model, Network
from thinwire import Memory, Program
from thinwire.engine.engine import Engine
from thinwire.engine.ops import AllReduce, Collectives
from thinwire.engine.streams import SideStream, Writers
from thinwire.monitors.replicas import fingerprints, gather_fingerprints
from thinwire.programs.program import Programs
from thinwire.step import runner
from thinwire.step.runner import AttachedRun, Choice, Connection
from thinwire.step.strategy import Gradients, Stages

LIMIT = timedelta(seconds=30)
SHAPES = {
    "0.weight": (8, 4),
    "0.bias": (8,),
    "0.gain": (8, 2),
    "1.weight": (4, 8),
    "1.bias": (4,),
    "1.gain": (2, 4),
}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    found = Model()
    found.install(monkeypatch)
    return found


class Training:
    """Backward passes of a model with two buckets, as DDP runs them."""

    def __init__(
        self,
        model: Model,
        program: Program,
        exceptions: dict[str, Program] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.program, self.exceptions, self.dtype = model, program, exceptions or {}, dtype
        network: Any = Network(model, LIMIT)
        self.engine = Engine(network, device=torch.device("cuda"))
        wrapped: Any = SimpleNamespace(
            check_finalization=lambda: None,
            find_unused_parameters=False,
            reduces_gradients=True,
            on_gone=lambda *given: None,
            parameters=dict,
            shapes=dict,
            tensors=dict,
            use_counts=lambda: None,
            spoil_gradients=lambda: None,
            agree_finite=lambda finite, step, overflowed: finite,
            write_means=lambda run, committed: None,
        )
        stages = Stages({0: Gradients(program)})
        self.run = AttachedRun(wrapped, Connection(network, self.engine), stages, scaler=None)
        self.steps = self.run.steps
        self.choice = Choice(Programs(program, self.exceptions), Memory())
        self.buffers = [self._buffer("0."), self._buffer("1.")]
        self.parameters = {name: torch.ones(shape) for name, shape in SHAPES.items()}

    def _buffer(self, prefix: str) -> torch.Tensor:
        own = [torch.Size(shape) for name, shape in SHAPES.items() if name.startswith(prefix)]
        return torch.zeros(sum(shape.numel() for shape in own), dtype=self.dtype)

    def backward(self, number: int, before: Callable[[], Any] = lambda: None) -> None:
        before()
        futures = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "in_backward", lambda: True)
            patch.setattr(runner, "queue_callback", lambda callback: None)
            for index, buffer in enumerate(self.buffers):
                buffer.copy_(torch.randn(buffer.shape) + number)  # gradients, by temporary tensors
                futures.append(self._hook(index, buffer))
                self._compute()
        for future in futures:  # DDP's final callback
            self.model.access(future.wait(), False, "DDP copies gradients")
        self.run.settle()

    def _hook(self, index: int, buffer: torch.Tensor) -> Any:
        names = tuple(name for name in SHAPES if name.startswith(f"{index}."))
        return self.run.bucket_ready(
            buffer,
            names,
            tuple(torch.Size(SHAPES[name]) for name in names),
            index=index,
            last=index == len(self.buffers) - 1,
            strided_as=[self.parameters[name] for name in names],
            choice=self.choice,
        )

    def _compute(self) -> None:
        """Allocate and free on backward's stream, as the gradients of earlier layers do."""
        for _ in range(4):
            torch.ones(64).mul_(2)


PROGRAMS: dict[str, Program] = {
    "Exact": thinwire.Exact(),
    "BF16": thinwire.BF16(),
    "Int8": thinwire.Int8(),
    "TopK": thinwire.TopK(0.5),
    "RandomK": thinwire.RandomK(0.5),
    "PowerSGD": thinwire.PowerSGD(rank=1, min_compression=1, warmup=0),
    "PowerSGD, warm-up": thinwire.PowerSGD(rank=1, min_compression=1),
}
SPLIT: dict[str, Program] = {"0.bias": thinwire.Exact(), "1.bias": thinwire.BF16()}


@pytest.mark.parametrize("split", [False, True], ids=["whole buckets", "split buckets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_stream_reads_too_early_and_no_memory_is_reused_too_early(
    model: Model, name: str, split: bool, dtype: torch.dtype
) -> None:
    with model:
        training = Training(model, PROGRAMS[name], SPLIT if split else None, dtype)
        for number in range(3):
            training.backward(number)
        training.engine.close()
    assert model.races == []
    assert {entry[1] for entry in model.log if entry[0] in ("issue", "order")} == {"side 0"}
    assert training.steps.count == 3
    assert training.engine.stats().records[0].wire_seconds is None, "host times say nothing of a device"


def test_fingerprints_outlive_their_last_reference(model: Model) -> None:
    with model:
        training = Training(model, thinwire.Exact())
        found: list[Any] = []

        def compare() -> None:
            own = fingerprints(training.parameters.values())
            steps = gather_fingerprints(own, active=True)
            found.append(training.engine.submit(steps, step=0, label="replicas", last=False, instead=own))

        training.backward(0, compare)
        found[0].wait()
        training.engine.close()
    assert model.races == []


def test_what_the_host_reads_after_a_step_is_ordered_by_settling_it(model: Model) -> None:
    """A rank without inputs (Join) has no final callback of DDP that would wait for the futures."""

    def program(found: list[torch.Tensor]) -> Collectives[torch.Tensor]:
        found.append((yield AllReduce(torch.ones(4))) * 2)
        return found[0]

    with model:
        network: Any = Network(model, LIMIT)
        engine = Engine(network, device=torch.device("cuda"))
        found: list[torch.Tensor] = []
        instead = torch.zeros(4)
        engine.submit(program(found), step=0, label="it", last=True, instead=instead)
        engine.settle()
        found[0].sum()
        engine.close()
    assert model.races == []


BROKEN = {
    "keep": (SideStream, "memory was freed on backward and reused during"),
    "join": (Writers, "is not ordered after"),
}


@pytest.mark.parametrize("method", BROKEN)
def test_the_model_sees_what_each_precaution_prevents(
    model: Model, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    kind, said = BROKEN[method]
    monkeypatch.setattr(kind, method, lambda self, *given: None)
    with model:
        training = Training(model, thinwire.Int8(), SPLIT, torch.bfloat16)
        for number in range(2):
            training.backward(number)
        training.engine.close()
    assert any(said in race for race in model.races), model.races


def test_the_model_sees_that_settling_orders(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SideStream, "join", lambda self: None)
    test_this: Callable[[Model], None] = test_what_the_host_reads_after_a_step_is_ordered_by_settling_it
    with pytest.raises(AssertionError, match="not ordered after"):
        test_this(model)


BACKWARD = ("wait", "side 0", "backward")


def two_stages(model: Model, name: str) -> Collectives[torch.Tensor]:
    for stage in ("encode", "combine"):
        model.log.append((f"{stage} {name}", model.current.name))
        yield AllReduce(torch.zeros(2))
    model.log.append((f"decode {name}", model.current.name))
    return torch.zeros(2)


def test_everything_runs_on_the_side_stream_and_waits_only_for_the_gradients_it_needs(model: Model) -> None:
    with model:
        network: Any = Network(model, LIMIT)
        engine = Engine(network, device=torch.device("cuda"))
        instead = torch.zeros(())
        for number in range(3):
            model.log.append(("gradients ready", model.current.name))
            last = number == 2
            engine.submit(two_stages(model, str(number)), step=0, label="it", last=last, instead=instead)
        engine.settle()
        engine.close()
    log = model.log
    work = [entry for entry in log if entry[0] not in ("wait", "gradients ready")]
    assert work, "nothing ran"
    assert {entry[1] for entry in work} == {"side 0"}, "work left the side stream"
    turns = ("encode", "combine", "decode")
    stages = ["backward" if entry == BACKWARD else entry[0] for entry in log]
    stages = [entry for entry in stages if entry.startswith(("backward", *turns))]
    # Bucket 0 combines before the stream waits for the gradients of bucket 2, although its second collective
    # comes after the first one of that bucket.
    expected = ["backward", "encode 0", "backward", "encode 1", "combine 0", "backward", "encode 2"]
    assert stages == [*expected, "combine 1", "combine 2", "decode 0", "decode 1", "decode 2"]
    assert [entry[0] for entry in log].count("issue") == 6
