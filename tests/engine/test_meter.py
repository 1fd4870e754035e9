"""Bytes and times of steps, and their totals."""

import torch

from thinwire import AllGather, AllReduce
from thinwire.engine.meter import MODELS, Meter, OpRecord, StepTrace, _covered


def interval(issued: float, ended: float | None) -> OpRecord:
    return OpRecord(0, 0, "AllReduce", 0, issued, ended)


def test_wire_time_counts_overlaps_once() -> None:
    assert _covered([]) == 0
    assert _covered([interval(1, 3), interval(2, 5), interval(7, 8)]) == 5
    assert _covered([interval(1, 9), interval(2, 3)]) == 8
    assert _covered([interval(1, None)]) == 0


def test_a_step_adds_up_its_collectives() -> None:
    trace = StepTrace(7, rank=0, size=2)
    trace.issued(0, 0, AllReduce(torch.zeros(100)))
    trace.issued(1, 0, AllReduce(torch.zeros(50)))
    trace.issued(0, 1, AllGather(torch.zeros(10, dtype=torch.uint8)))
    record = trace.finish(0.25, timed=True)
    assert record.bytes_by_kind == {"AllReduce": 600, "AllGather": 10}
    assert record.bytes_sent == 610
    assert record.order == ((0, 0, "AllReduce"), (1, 0, "AllReduce"), (0, 1, "AllGather"))
    assert (record.step, record.exposed_seconds) == (7, 0.25)


def test_totals_outlive_the_history() -> None:
    meter = Meter(history=2)
    for step in range(5):
        trace = StepTrace(step, rank=0, size=2)
        trace.issued(0, 0, AllReduce(torch.zeros(1)))
        meter.add(trace.finish(1.0, timed=True))
    stats = meter.snapshot()
    assert (stats.steps, stats.bytes_sent, stats.exposed_seconds) == (5, 20, 5)
    assert [record.step for record in stats.records] == [3, 4]
    assert stats.last is not None
    assert stats.last.step == 4


def test_times_that_cannot_be_known_are_none() -> None:
    record = StepTrace(0, rank=0, size=1).finish(1.0, timed=False)
    assert record.exposed_seconds is record.wire_seconds is record.encode_seconds is None
    assert Meter(history=1).snapshot().last is None


def test_an_overflow_is_a_fact_of_its_record() -> None:
    meter = Meter()
    for step in range(3):
        meter.add(StepTrace(step, rank=0, size=2).finish(0.0, timed=True))
    meter.add(StepTrace(2, rank=0, size=2, purpose=MODELS).finish(0.0, timed=True))
    meter.overflowed()
    stats = meter.snapshot()
    assert [record.overflowed for record in stats.records] == [False, False, True, False]
    assert (stats.overflows, stats.steps, stats.exchanges) == (1, 3, 4)


def test_totals_as_text_name_skipped_steps() -> None:
    meter = Meter(ddp_bytes=400)
    trace = StepTrace(0, rank=0, size=2)
    trace.issued(0, 0, AllReduce(torch.zeros(101)))  # ZeRO sends a few bytes more, for its checks
    meter.add(trace.finish(0.0, timed=True))
    assert str(meter.snapshot()) == "1 step: 0.000404 MB sent, as much as plain DDP, exposed 0 s"
    meter.overflowed()
    assert str(meter.snapshot()).endswith("exposed 0 s, 1 step skipped after overflows")
    meter.overflowed()
    assert str(meter.snapshot()).endswith("2 steps skipped after overflows")
