"""The planner: the formula's properties, bytes told by programs, and recommendations."""

import math
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire
from tests.simulated import bytes_of
from thinwire import Bucket, Collectives, Memory, OptionError, Outcome, Program
from thinwire.plan import planner as planner_module
from thinwire.plan.candidates import DEFAULTS, PLAIN_DDP, Candidate, exchanges_of, outer_bytes
from thinwire.plan.compute import assumed, measure, transformer_shapes
from thinwire.plan.cost import Chunk, Compute, averaged_cost, step_cost
from thinwire.plan.encode import Speeds
from thinwire.plan.gaps import TRANSFORMER, Gap, Known, kind_of, shipped
from thinwire.plan.network import HOST_RATE, Link, Network, Transfer
from thinwire.plan.planner import Planner, Row
from thinwire.plan.probe import Probe
from thinwire.plan.recommend import Limits, recommend
from thinwire.plan.traffic import Layout, handed_over, traffic
from thinwire.programs.description import short
from thinwire.programs.wrapper import as_program
from thinwire.strategies.averaging.anchors import split_evenly
from thinwire.tools.bench import load as load_module
from thinwire.tools.bench.load import Load, LoadMeter, measuring
from thinwire.tools.bench.parsing import parse_program
from thinwire.tools.bench.workloads import WORKLOADS

SHAPES = {"head": torch.Size((256, 64)), "norm": torch.Size((64,)), "up": torch.Size((64, 256))}
COMPUTE = Compute(begin=0.02, arrivals=(0.04, 0.06, 0.1), backward=0.1, optimizer=0.01)
KINDS = ("AllReduce", "AllGather", "AllToAll", "ReduceScatter", "Broadcast", "Reduce")


def network(rate: float = 1e8, ranks: int = 4, latency: float = 1e-3, message: float = 50e-6) -> Network:
    link = Link(up=rate, down=rate, latency=latency)
    return Network(ranks=ranks, link=link, message_seconds=message)


chunks = st.lists(
    st.builds(
        lambda arrival, work, sends, kind: Chunk(
            arrival, 4 * sends[0], (work,) * (len(sends) + 1), tuple(Transfer(kind, one, 4) for one in sends)
        ),
        st.floats(0.02, 0.1),
        st.floats(0, 0.01),
        st.lists(st.integers(0, 10**7), min_size=1, max_size=3),
        st.sampled_from(KINDS),
    ),
    min_size=1,
    max_size=6,
).map(lambda made: sorted(made, key=lambda chunk: chunk.arrival))


@given(chunks, st.floats(1e6, 1e10), st.floats(0, 0.1))
def test_a_step_is_never_shorter_than_computing_or_its_bytes(
    made: list[Chunk], rate: float, latency: float
) -> None:
    cost = step_cost(made, COMPUTE, network(rate, latency=latency))
    assert cost.step >= COMPUTE.step
    assert cost.step >= made[0].arrival + 8 * cost.bytes / rate
    assert 0 < cost.utilisation <= 1


@given(chunks, st.floats(1e6, 1e10), st.floats(1.0, 10.0))
def test_a_step_is_monotone_in_bytes_rate_latency_and_encoding(
    made: list[Chunk], rate: float, more: float
) -> None:
    base = step_cost(made, COMPUTE, network(rate)).step
    tolerance = 1e-9 + base * 1e-9
    larger = [
        replace(one, transfers=tuple(t._replace(sent=int(more * t.sent)) for t in one.transfers))
        for one in made
    ]
    slower = [replace(one, encode=tuple(more * work for work in one.encode)) for one in made]
    assert step_cost(larger, COMPUTE, network(rate)).step >= base - tolerance
    assert step_cost(slower, COMPUTE, network(rate)).step >= base - tolerance
    assert step_cost(made, COMPUTE, network(rate * more)).step <= base + tolerance
    assert step_cost(made, COMPUTE, network(rate, latency=1e-3 * more)).step >= base - tolerance


@given(st.sampled_from([thinwire.Exact(), thinwire.BF16(), thinwire.Int8()]), st.integers(2, 5))
@settings(max_examples=12, deadline=None)
def test_a_step_takes_longer_with_more_ranks(program: Program, ranks: int) -> None:
    steps = []
    for count in (ranks, 2 * ranks):
        found = [
            Chunk(0.1, 4, (0.0,) * 3, traffic(one.layout, count, 10).transfers[:2])
            for one in handed_over(program, SHAPES)
        ]
        found = [replace(one, encode=(0.0,) * (len(one.transfers) + 1)) for one in found]
        steps.append(step_cost(found, COMPUTE, network(1e6, count)).step)
    assert steps[1] >= steps[0]


def test_up_down_and_half_duplex() -> None:
    transfer = Transfer("AllToAll", 10**6, 2)
    home = Network(ranks=2, link=Link(up=2e7, down=1e8), message_seconds=0.0)
    assert home.occupied(transfer) == pytest.approx(0.4)
    half = Network(ranks=2, link=Link(up=1e8, down=1e8, duplex=False), message_seconds=0.0)
    assert half.occupied(transfer) == pytest.approx(0.16)
    inside = Network(ranks=8, link=Link(up=1e6, down=1e6), inside=Link(up=1e9, down=1e9), message_seconds=0.0)
    assert inside.occupied(transfer._replace(local=True)) == pytest.approx(0.008)
    assert inside.occupied(transfer) == pytest.approx(8.0)


def test_communication_hides_behind_backward_and_encoding_delays_it() -> None:
    first = Chunk(0.02, 0, (0.0, 0.0), (Transfer("AllGather", 500_000, 2),))
    fast = network(1e8, 2, 0.0, message=0.0)
    assert step_cost([first], COMPUTE, fast).exposed == 0
    assert step_cost([first], COMPUTE, fast).step == pytest.approx(COMPUTE.step)
    busy = replace(first, encode=(0.03, 0.0))
    assert step_cost([busy], COMPUTE, fast).step == pytest.approx(COMPUTE.step + 0.03)


def test_on_busy_hosts_the_network_takes_time_from_backward() -> None:
    early, late = (
        Chunk(arrival, 0, (0.0, 0.0), (Transfer("AllGather", 10**6, 2),)) for arrival in (0.02, 0.1)
    )
    there = replace(network(1e12, 2, 0.0, message=1e-3), message_rate=1e8)
    alone, crowded = COMPUTE, replace(COMPUTE, cores=1.0)
    assert step_cost([early], alone, there).step == pytest.approx(COMPUTE.step)
    assert step_cost([early], crowded, there).step == pytest.approx(COMPUTE.step + 1e-3 + 0.01)
    assert step_cost([late], crowded, there).step == pytest.approx(step_cost([late], alone, there).step)


def test_sums_of_half_precision_have_their_own_host_rate() -> None:
    there = Network(ranks=2, link=Link(), reduce_rate=1e9, narrow_rate=4e8, message_seconds=0.0)
    assert there.occupied(Transfer("AllReduce", 10**6, 2)) == pytest.approx(1e-3)
    assert there.occupied(Transfer("AllReduce", 10**6, 2, width=2)) == pytest.approx(2.5e-3)
    assert there.occupied(Transfer("AllGather", 10**6, 2, width=2)) == pytest.approx(10**6 / 1.5e9)


class Timed:
    """A communicator of two ranks on a link, as the probe uses it, in virtual time."""

    rank, size = 0, 2

    def __init__(self, up: float, down: float, reduced: float) -> None:
        self.now = 0.0
        self._up, self._down, self._reduced = up, down, reduced

    def issue(self, op: Any) -> Any:
        if isinstance(op, thinwire.Exchange):
            self.now += sum(op.sends) / self._up if sum(op.sends) else sum(op.receives) / self._down
        elif isinstance(op, thinwire.AllToAll):
            self.now += op.bytes_sent(0, 2) / min(self._up, self._down)
        elif isinstance(op, thinwire.AllReduce):
            self.now += op.bytes_sent(0, 2) / self._reduced
        received = op.tensor if isinstance(op, thinwire.AllGather) else torch.zeros(1)
        return SimpleNamespace(wait=lambda: received)


@pytest.mark.parametrize("reduced", [0.9e6, 0.3e6])
def test_the_probe_tells_a_slow_link_from_a_slow_host(
    monkeypatch: pytest.MonkeyPatch, reduced: float
) -> None:
    link = Timed(1e6, 1e6, reduced)
    monkeypatch.setattr("thinwire.plan.probe.time.perf_counter", lambda: link.now)
    found = Probe(cast(Any, link)).run()
    assert found.link.up == pytest.approx(8e6, rel=0.01)
    assert found.message_rate == HOST_RATE, "the link was the bound, so that nothing is known of the host"
    assert found.reduce_rate == (HOST_RATE if reduced == 0.9e6 else pytest.approx(reduced, rel=0.01))


def test_averaged_models_pay_once_a_period_and_overlap() -> None:
    chunk = Chunk(0.0, 0, (0.0, 0.0), (Transfer("AllGather", 10**6, 2),))
    there = network(8e6, 2, 0.0, message=0.0)
    cost = averaged_cost([([chunk], 0)], 10, COMPUTE, there)
    assert cost.step == pytest.approx(COMPUTE.step + 0.1)
    assert cost.bytes == 1e5
    hidden = averaged_cost([([chunk], 5)], 10, COMPUTE, there)
    assert hidden.step == pytest.approx(COMPUTE.step + (1 - 5 * COMPUTE.step) / 10)


def test_stragglers_cost_more_with_more_ranks_and_less_over_a_period() -> None:
    uneven = replace(COMPUTE, spread=0.01)
    steps = [step_cost([], uneven, network(ranks=ranks)).stragglers for ranks in (1, 2, 64)]
    assert steps[0] == 0 < steps[1] < steps[2]
    assert averaged_cost([], 16, uneven, network(ranks=64)).stragglers == pytest.approx(steps[2] / 4)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("text", [one for one in DEFAULTS if "LoCo" not in one])
def test_bytes_are_those_that_simulated_ranks_send(text: str, ranks: int) -> None:
    program = Candidate.of(text, parse_program(text)).program
    for handed in handed_over(program, SHAPES):
        layout = handed.layout
        shapes = {str(place): shape for place, shape in enumerate(layout.shapes)}
        sent = bytes_of(layout.program, ranks, shapes, [str(place) for place in layout.exact])
        assert sum(one.sent for one in traffic(layout, ranks, 0).transfers) == sent


@pytest.mark.parametrize("text", ["Int8", "Int4", "FP8", "Sign", "TwoShot(Quantize(bits=8))", "TopK", "Int2"])
@pytest.mark.parametrize("ranks", [2, 5, 33])
def test_an_outline_tells_what_a_program_yields(text: str, ranks: int) -> None:
    program = parse_program(text)
    layout = handed_over(program, SHAPES)[0].layout  # type: ignore[arg-type]
    bucket = layout.bucket(torch.empty(layout.numbers, device="meta"), ranks, 0)
    told = [(type(op).__name__, op.nbytes) for op in program.outline(bucket)]  # type: ignore[union-attr]
    run = traffic(layout, ranks, 0).transfers
    sent = [(one.kind, one.sent) for one in run]
    assert [
        (kind, nbytes * (ranks - 1) // (ranks if kind == "AllToAll" else 1)) for kind, nbytes in told
    ] == sent


def own_program(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
    total = yield thinwire.AllReduce(bucket.buffer.to(torch.float64))
    return Outcome(mean=(total / bucket.world_size).to(bucket.buffer.dtype))


def test_a_users_own_program_is_planned() -> None:
    candidate = Candidate.of("mine:own_program", own_program)
    planner = Planner(assumed(SHAPES, 0.1))
    cost = planner.cost(candidate, network(ranks=2))
    numbers = sum(shape.numel() for shape in SHAPES.values())
    assert cost.bytes == 8 * numbers
    assert cost.encode > 0


def test_the_buckets_of_a_real_model_and_a_measured_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    measured = measure(_Loss(model), lambda step: torch.ones(2, 8), lambda own: torch.optim.SGD(own, lr=0.1))
    assert next(iter(measured.shapes)).startswith("model.2")
    times = measured.compute
    assert times.begin < times.arrivals[0] <= times.arrivals[-1] <= times.backward < times.step
    assert len(times.arrivals) == 4


class _Loss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch).square().mean()
        return loss


def test_exchanges_follow_the_configuration() -> None:
    streaming = thinwire.DiLoCo(period=8, program=thinwire.Int4(), fragments=2, overlap=1)
    found = exchanges_of(streaming, SHAPES, 4, 8)
    assert [one.overlap for one in found] == [1, 1]
    numbers = [shape.numel() for one in found for layout in one.layouts for shape in layout.shapes]
    assert sorted(numbers) == sorted(shape.numel() for shape in SHAPES.values())
    assert outer_bytes(streaming, SHAPES) == 2 * 4 * sum(numbers)
    levels = thinwire.Hierarchical({2: 2, 8: None})
    assert [one.ranks for one in exchanges_of(levels, SHAPES, 4, 8)] == [2, 2, 2, 4]


@pytest.mark.parametrize(
    "text", ["ZeRO", "Schedule({0: Exact(), 5: Int8()})", "LocalSGD(period=8, within=2)"]
)
def test_what_cannot_be_planned_is_an_error(text: str) -> None:
    with pytest.raises(OptionError, match="cannot be planned"):
        Candidate.of(text, parse_program(text))


def rows(
    rate: float,
    texts: tuple[str, ...] = ("BF16", "Int8", "Int4", "TopK", "RandomK"),
    known: Known | None = None,
) -> list[Row]:
    speeds = Speeds(factor=0.01)  # so that a busy machine changes no order
    planner = Planner(
        assumed({f"w{number}": torch.Size((512, 512)) for number in range(8)}, 0.1), speeds=speeds
    )
    candidates = [Candidate.of(text, parse_program(text)) for text in texts]
    return planner.rows(candidates, network(rate, 2), known or Known())


def test_it_recommends_where_it_pays_and_says_dont_where_it_does_not() -> None:
    lossy = Gap(0.13, "results file", "mine", 10, 256)
    slow = rows(1e7, known=Known(own={"TopK()": lossy}))
    advice = recommend(slow, network(1e7, 2), Limits(), 1000)
    assert advice.row is not None
    assert advice.row.candidate.name == "Int4()"
    assert "1000 steps take" in advice.text
    assert "Faster, but its loss gap of 13 % exceeds 1 %: TopK()" in advice.text
    own_program = recommend(rows(1e7, ("Int4", "TopK(0.03)")), network(1e7, 2), Limits())
    assert "Faster, but its loss gap is unknown: TopK(ratio=0.03)" in own_program.text
    assert recommend(slow, network(1e7, 2), Limits(exclude=["int4"])).row is slow[2]
    assert recommend(slow, network(1e7, 2), Limits(memory=1.0, gap=0.0)).row is None
    fast = recommend(rows(1e12), network(1e12, 2), Limits())
    assert fast.row is None
    assert fast.text.startswith("Don't.")


def test_the_crossover_is_where_steps_are_equal() -> None:
    texts = ("Int8", "Exact")
    planner = Planner(assumed({"w": torch.Size((512, 512))}, 0.1))
    int8, exact = (Candidate.of(text, parse_program(text)) for text in texts)
    there = Network(ranks=2, link=Link(up=1e8, down=2e8), message_rate=1e12, reduce_rate=1e12)
    rate = planner.crossover(int8, there)
    assert 1e6 < rate < 1e12
    at = replace(there, link=Link(up=rate, down=2 * rate))
    plain, own = planner.cost(PLAIN_DDP, at).step, planner.cost(int8, at).step
    assert own == pytest.approx(plain, rel=1e-3)
    assert planner.crossover(exact, there) == 0


def test_every_shipped_gap_is_of_a_program_that_the_text_makes() -> None:
    made = {
        short(
            parse_program(
                text.replace("functools.partial(<class 'torch.optim.sgd.SGD'>", "partial(torch.optim.SGD")
            )
        )
        for text in shipped()
    }
    assert made == set(shipped())
    assert all(gap.command and gap.parameters and gap.steps for gaps in shipped().values() for gap in gaps)


def test_gaps_by_length_and_the_users_own() -> None:
    (text,) = [one for one in shipped() if one.endswith("nesterov=True), program=Int4())")]
    diloco = parse_program(
        text.replace("functools.partial(<class 'torch.optim.sgd.SGD'>", "partial(torch.optim.SGD")
    )
    near = [Known(steps=steps).gap(diloco) for steps in (1000, 50_000, None)]
    assert [one and round(one.value, 3) for one in near] == [0.024, 0.004, 0.024]
    own = Gap(0.5, "results file")
    assert Known(own={"Int8()": own}).gap(thinwire.Int8()) is own
    assert Known().gap(own_program) is None


def test_a_transformer_of_a_size_has_that_size() -> None:
    for count in (1e6, 1.3e9, 7e10):
        assert sum(s.numel() for s in transformer_shapes(count).values()) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize("text", DEFAULTS)
def test_every_default_is_planned_for_many_hosts(text: str) -> None:
    planner = Planner(assumed({"w": torch.Size((64, 64)), "v": torch.Size((64, 64))}, 0.1), speeds=Speeds())
    for ranks in (2, 8, 64):
        plain, row = planner.quick_rows(
            [Candidate.of(text, parse_program(text))], network(1e8, ranks), Known()
        )
        assert plain.candidate.argument is None
        assert math.isfinite(row.cost.step)


def test_many_ranks_take_a_moment() -> None:
    layout = Layout.of(thinwire.Int8(), ("w",), {"w": torch.Size((1024, 1024))}, ())
    sent = [sum(one.sent for one in traffic(layout, ranks, 0).transfers) for ranks in (64, 4096)]
    assert sent[1] < 1.1 * sent[0]
    assert math.isfinite(sum(Speeds().seconds(layout, 4096, 0)))


def test_thousands_of_parameters_are_laid_out_once_and_few_of_them_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    laid_out = []

    def counted(*given: Any, **options: Any) -> Any:
        laid_out.append(given)
        return handed_over(*given, **options)

    monkeypatch.setattr(planner_module, "handed_over", counted)
    shapes = {f"w{number}": torch.Size((2 + number % 3, 2)) for number in range(2000)}
    planner = Planner(assumed(shapes, 0.1))
    _, row = planner.rows([Candidate.of("Int8", thinwire.Int8())], network(1e6, 2), Known())
    assert math.isfinite(row.cost.step)
    assert len(laid_out) == 1, "a crossover lays the model out again for each rate"
    assert isinstance(planner.speeds, Speeds)
    (speed,) = planner.speeds._known.values()
    assert speed.numbers == pytest.approx(sum(shape.numel() for shape in shapes.values()) / 8, rel=0.05)


def test_a_slow_program_is_timed_in_few_rounds_and_for_one_layout() -> None:
    calls = []

    def slow_program(bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        calls.append(bucket)
        time.sleep(0.2)
        total = yield thinwire.AllReduce(bucket.buffer)
        return Outcome(mean=total / bucket.world_size)

    speeds = Speeds()
    for width in range(4, 12):
        layout = Layout("slow", (torch.Size((width, width)),), (), as_program(slow_program))
        assert sum(speeds.seconds(layout, 2, 0)) > 0
    assert len(calls) == 3, "one round to warm up and two to compare"


def test_many_parameters_are_split_into_fragments_in_linear_time() -> None:
    class Counting(dict[str, int]):
        reads = 0

        def __getitem__(self, name: str) -> int:
            self.reads += 1
            return super().__getitem__(name)

    sizes = Counting({f"w{number}": number % 7 for number in range(3000)})
    assert sum(map(len, split_evenly(sizes, 2))) == 3000
    assert sizes.reads <= 3 * len(sizes)


@pytest.mark.parametrize(
    ("cores", "others", "needed", "busy"),
    [(2, 0.1, 1, False), (2, 0.9, 1, False), (2, 1.6, 1, True), (64, 40.0, 8, False), (2, None, 2, False)],
)
def test_a_machine_is_busy_if_others_use_cores_that_the_timed_work_needs(
    cores: int, others: float | None, needed: float, busy: bool
) -> None:
    load = Load(cores=cores, others=others, needed=needed)
    assert load.busy is busy
    assert load.doubt().startswith(" Uncertain: other processes used 1.6") is busy


def test_the_load_is_the_time_of_others_and_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 0.0, "all": 100.0, "own": 1.0}
    monkeypatch.setattr(load_module, "time", SimpleNamespace(perf_counter=lambda: clock["wall"]))
    monkeypatch.setattr(load_module, "machine_seconds", lambda: clock["all"])
    monkeypatch.setattr(load_module, "own_seconds", lambda: clock["own"])
    one, four = LoadMeter(), LoadMeter(copies=4)
    clock.update({"wall": 10.0, "all": 125.0, "own": 6.0})
    assert one.read().others == pytest.approx(2.0)
    assert four.read().others == pytest.approx(0.5)
    monkeypatch.setattr(load_module, "machine_seconds", lambda: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    assert LoadMeter().read().others == 3.0


def test_a_plan_measures_with_the_threads_of_training_and_restores_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with measuring() as timing:
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert "1 thread (as torchrun sets it" in str(timing)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with measuring() as timing:
            assert torch.get_num_threads() == 2
        assert "2 threads (OMP_NUM_THREADS=2)" in str(timing)
    finally:
        torch.set_num_threads(before)


def test_gaps_of_another_kind_of_model_are_unknown_and_better_losses_are_no_promise() -> None:
    gpt, conv = WORKLOADS["gpt-1m"].model(), WORKLOADS["conv"].model()
    assert (kind_of(gpt), kind_of(conv)) == (TRANSFORMER, "")
    assert kind_of(torch.nn.TransformerEncoderLayer(8, 2)) == TRANSFORMER
    diloco = parse_program("DiLoCo(period=16, program=Int4())")
    here, there = (Known(steps=20_000, kind=kind_of(model)).gap(diloco) for model in (gpt, conv))
    assert here is not None
    assert there is not None
    assert here.value < 0
    assert str(here) == "none measured (gpt-1m, 1.3 M, 4096 steps)"
    assert str(there) == "unknown for this kind of model"


def test_gradient_programs_are_advised_first_and_averaged_models_as_the_alternative() -> None:
    texts = ("Int4", "DiLoCo(period=16, program=Int4())")
    here = rows(1e7, texts, Known(steps=20_000, kind=TRANSFORMER))
    advice = recommend(here, network(1e7, 2), Limits())
    assert advice.row is here[1]
    assert advice.alternative is here[2]
    assert "use Int4()" in advice.text
    assert "Alternative: DiLoCo(period=16, program=Int4())" in advice.text
    there = rows(1e7, texts, Known(steps=20_000))
    advice = recommend(there, network(1e7, 2), Limits())
    assert advice.row is there[1]
    assert advice.alternative is None
    assert "unknown for this kind of model; elsewhere +0.17 % (gpt-1m" in advice.text
    assert "Faster, but its loss gap is unknown for this kind of model: DiLoCo" in advice.text
    alone = recommend(here, network(1e7, 2), Limits(exclude=["int4"]))
    assert alone.row is here[2]
    assert "No gradient program pays" in alone.text
