"""The engine in one process, with a communicator that answers itself."""

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

from thinwire import AllReduce, ProgramError, Steps, WireError
from thinwire.wire.engine import Engine
from thinwire.wire.ops import Await, Collective, among
from thinwire.wire.schedule import order


class Meeting:
    def __init__(self) -> None:
        self.words: dict[int, str] = {}

    def report(self, text: str) -> None:
        self.words.setdefault(0, text)

    def reports(self, limit: timedelta) -> dict[int, str]:
        return self.words


class Reply:
    def __init__(self, value: Any, delay: float) -> None:
        self._value = value
        self._at = time.monotonic() + delay

    def done(self) -> bool:
        return time.monotonic() >= self._at

    def wait(self) -> Any:
        time.sleep(max(0.0, self._at - time.monotonic()))
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Echo:
    """Rank 0 of two, whose peer sends the same."""

    rank, size = 0, 2

    def __init__(self, limit: float = 30, delay: float = 0.001) -> None:
        self.limit = timedelta(seconds=limit)
        self.roll_call = timedelta(0)
        self.meeting = Meeting()
        self.closed = False
        self.answer: Exception | None = None
        self._delay = delay

    def issue(self, op: Collective | Await) -> Reply:
        assert isinstance(op, Collective)
        return Reply(self.answer or op.tensor, self._delay)

    def close(self) -> None:
        self.closed = True


def staged(stages: int) -> Steps[torch.Tensor]:
    for stage in range(stages):
        yield AllReduce(torch.full((4,), float(stage)))
    return torch.tensor(float(stages))


def submit(engine: Engine, program: Steps[torch.Tensor], *, label: str, last: bool) -> Any:
    return engine.submit(program, label=label, last=last, instead=torch.zeros(()))


def engine_on(echo: Echo, *, inline: bool = False) -> Engine:
    return Engine(echo, inline=inline)  # type: ignore[arg-type]


@pytest.mark.parametrize("inline", [False, True])
def test_steps_run_in_the_static_order_with_and_without_the_thread(inline: bool) -> None:
    engine = engine_on(Echo(), inline=inline)
    counts = [1, 3, 0, 2, 4, 1]
    for _ in range(3):
        futures = [
            submit(engine, staged(count), label=f"bucket {index}", last=index == len(counts) - 1)
            for index, count in enumerate(counts)
        ]
        engine.settle()
        assert [future.wait().item() for future in futures] == counts
    stats = engine.stats()
    assert engine.step == stats.steps == 3
    for record in stats.records:
        assert [(bucket, stage) for bucket, stage, _ in record.order] == order(counts)
    engine.close()


def test_exposed_time_is_the_time_spent_waiting() -> None:
    engine = engine_on(Echo(delay=0.2))
    submit(engine, staged(1), label="a", last=True)
    engine.guard()
    engine.settle()
    submit(engine, staged(1), label="a", last=True)
    time.sleep(0.4)  # backward computes for longer than the collective takes
    engine.guard()
    engine.settle()
    first, second = engine.stats().records
    assert first.exposed_seconds is not None
    assert first.exposed_seconds > 0.1
    assert second.exposed_seconds == 0
    assert second.wire_seconds is not None
    assert 0.15 < second.wire_seconds < 0.39
    engine.close()


def test_a_program_that_raises_takes_the_wire_down_with_a_reason() -> None:
    def broken() -> Steps[torch.Tensor]:
        yield AllReduce(torch.zeros(1))
        raise KeyError("lost")

    echo = Echo()
    engine = engine_on(echo)
    fine = submit(engine, staged(1), label="bucket 0", last=False)
    submit(engine, broken(), label="bucket 1 (w)", last=True)
    with pytest.raises(
        ProgramError, match=r"failed on bucket 1 \(w\), after 1 collectives: KeyError: 'lost'"
    ):
        engine.settle()
    assert fine.wait().item() == 1
    assert "KeyError" in echo.meeting.words[0]
    with pytest.raises(ProgramError, match="lost"):
        submit(engine, staged(1), label="next", last=True)
    engine.close()
    assert echo.closed


def test_an_interrupt_inside_a_program_takes_the_wire_down() -> None:
    def interrupted() -> Steps[torch.Tensor]:
        yield AllReduce(torch.zeros(1))
        raise KeyboardInterrupt

    echo = Echo(delay=0)
    engine = engine_on(echo, inline=True)
    with pytest.raises(KeyboardInterrupt):
        submit(engine, interrupted(), label="a", last=True)
    with pytest.raises(WireError, match="interrupted by KeyboardInterrupt"):
        submit(engine, staged(1), label="b", last=True)
    assert "KeyboardInterrupt" in echo.meeting.words[0]
    engine.close()


def test_a_program_that_fails_to_clean_up_hangs_nobody() -> None:
    def stubborn() -> Steps[torch.Tensor]:
        try:
            yield AllReduce(torch.zeros(1))
            yield AllReduce(torch.zeros(1))
        finally:
            raise KeyError("in clean-up")
        return torch.zeros(1)

    echo = Echo()
    echo.answer = RuntimeError("gone")
    engine = engine_on(echo)
    submit(engine, stubborn(), label="a", last=False)
    submit(engine, staged(1), label="b", last=True)
    with pytest.raises(WireError, match="gone"):
        engine.settle()
    engine.close()


def test_a_failed_collective_names_what_was_waited_for_and_who_is_silent() -> None:
    echo = Echo()
    echo.answer = RuntimeError("Connection closed by peer\nmore")
    engine = engine_on(echo)
    future = submit(engine, staged(1), label="bucket 5 (w)", last=True)
    with pytest.raises(WireError) as caught:
        engine.settle()
    for part in (
        "AllReduce of 4 float32",
        "step 0, bucket 5 (w), stage 0",
        "No word from rank 1",
        "closed by peer",
    ):
        assert part in str(caught.value)
    with pytest.raises(RuntimeError, match="No word from rank 1"):
        future.wait()
    engine.close()


@pytest.mark.parametrize(("answers", "named"), [([], "rank 1:"), ([1], "ranks 2, 3:")])
def test_of_ranks_that_took_no_part_none_is_named_while_one_that_did_is_silent(
    answers: list[int], named: str
) -> None:
    echo = Echo()
    echo.size, echo.answer = 4, RuntimeError("gone")
    echo.meeting.words.update(dict.fromkeys(answers, "waited"))
    engine = engine_on(echo)
    submit(engine, among((0, 1), staged(1)), label="a", last=True)
    with pytest.raises(WireError, match=f"No word from {named}"):
        engine.settle()
    engine.close()


def test_in_a_guarded_step_only_settle_raises() -> None:
    echo = Echo(delay=0.2)
    echo.answer = RuntimeError("gone")
    engine = engine_on(echo)
    future = submit(engine, staged(1), label="a", last=True)
    engine.guard()
    assert future.wait().item() == 0
    with pytest.raises(WireError, match="gone"):
        engine.settle()
    with pytest.raises(WireError, match="gone"):
        engine.guard()
    engine.close()


def test_a_step_that_never_ends_is_an_error_in_time() -> None:
    engine = engine_on(Echo(limit=0.1))
    future = submit(engine, staged(2), label="a", last=False)
    with pytest.raises(RuntimeError, match=r"last bucket did not come within 0\.1 s"):
        future.wait()
    with pytest.raises(WireError, match="last bucket did not come"):
        submit(engine, staged(1), label="b", last=True)
    engine.close()


def test_closing_ends_the_thread_and_later_submits_say_so() -> None:
    engine = engine_on(Echo())
    submit(engine, staged(1), label="a", last=True)
    engine.settle()
    assert any(thread.name == "thinwire" for thread in threading.enumerate())
    engine.close()
    engine.close()
    assert not any(thread.name == "thinwire" for thread in threading.enumerate())
    with pytest.raises(WireError, match="its DDP model is gone"):
        submit(engine, staged(1), label="a", last=True)


def test_the_thread_keeps_nothing_of_a_finished_step() -> None:
    engine = engine_on(Echo())
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)

    def using(tensor: torch.Tensor) -> Steps[torch.Tensor]:
        yield AllReduce(tensor)
        return torch.zeros(1)

    submit(engine, using(tensor), label="a", last=True)
    engine.settle()
    del tensor
    for _ in range(100):  # the thread may need a moment to come back to its inbox
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None
    engine.close()
