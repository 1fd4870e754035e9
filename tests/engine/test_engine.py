"""The engine and its scheduler in one process, with a communicator that answers itself."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.echo import Echo, engine_on, staged, submit
from thinwire import AllReduce, Collectives, ProgramError, WireError
from thinwire.engine.ops import among
from thinwire.engine.order import order
from thinwire.engine.streams import SideStream


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
    assert stats.steps == 3
    for record in stats.records:
        assert [(bucket, stage) for bucket, stage, _ in record.order] == order(counts)
    engine.close()


def test_exposed_time_is_the_time_spent_waiting() -> None:
    engine = engine_on(Echo(delay=0.5))
    submit(engine, staged(1), label="a", last=True)
    engine.guard()
    engine.settle()
    future = submit(engine, staged(1), label="a", last=True)
    while not future.done():  # backward computes for longer than the collective takes
        time.sleep(0.01)
    engine.guard()
    engine.settle()
    first, second = engine.stats().records
    assert first.exposed_seconds is not None
    assert first.exposed_seconds > 0
    assert second.exposed_seconds == 0
    assert second.wire_seconds is not None
    assert second.wire_seconds > 0.4
    engine.close()


def test_a_program_that_raises_takes_the_wire_down_with_a_reason() -> None:
    def broken() -> Collectives[torch.Tensor]:
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
    assert "KeyError" in echo.rendezvous.words[0]
    with pytest.raises(ProgramError, match="lost"):
        submit(engine, staged(1), label="next", last=True)
    engine.close()
    assert echo.closed


@pytest.mark.parametrize("inline", [False, True])
def test_run_ends_the_open_step_and_returns_the_result(inline: bool) -> None:
    engine = engine_on(Echo(), inline=inline)
    before = submit(engine, staged(2), label="bucket 0", last=False)
    assert engine.run(staged(3), step=0, label="the check").item() == 3
    assert before.done()
    assert engine.run(staged(1), step=1, label="alone").item() == 1
    assert [len(record.order) for record in engine.stats().records] == [5, 1]
    engine.close()


def test_run_raises_the_failure_of_any_program_of_its_step() -> None:
    def broken() -> Collectives[torch.Tensor]:
        yield AllReduce(torch.zeros(1))
        raise KeyError("lost")

    engine = engine_on(Echo())
    submit(engine, broken(), label="bucket 0", last=False)
    with pytest.raises(ProgramError, match="failed on bucket 0"):
        engine.run(staged(2), step=0, label="the check")
    engine.close()


def test_an_interrupt_inside_a_program_takes_the_wire_down() -> None:
    def interrupted() -> Collectives[torch.Tensor]:
        yield AllReduce(torch.zeros(1))
        raise KeyboardInterrupt

    echo = Echo(delay=0)
    engine = engine_on(echo, inline=True)
    with pytest.raises(KeyboardInterrupt):
        submit(engine, interrupted(), label="a", last=True)
    with pytest.raises(WireError, match="interrupted by KeyboardInterrupt"):
        submit(engine, staged(1), label="b", last=True)
    assert "KeyboardInterrupt" in echo.rendezvous.words[0]
    engine.close()


def test_a_program_that_fails_to_clean_up_hangs_nobody() -> None:
    def stubborn() -> Collectives[torch.Tensor]:
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
        "Rank 1 did not respond",
        "closed by peer",
    ):
        assert part in str(caught.value)
    with pytest.raises(RuntimeError, match="Rank 1 did not respond"):
        future.wait()
    engine.close()


@pytest.mark.parametrize(("answers", "named"), [([], "Rank 1"), ([1], "Ranks 2, 3")])
def test_of_ranks_that_took_no_part_none_is_named_while_one_that_did_is_silent(
    answers: list[int], named: str
) -> None:
    echo = Echo()
    echo.size, echo.answer = 4, RuntimeError("gone")
    echo.rendezvous.words.update(dict.fromkeys(answers, "waited"))
    engine = engine_on(echo)
    submit(engine, among((0, 1), staged(1)), label="a", last=True)
    with pytest.raises(WireError, match=f"{named} did not respond"):
        engine.settle()
    engine.close()


def test_a_rank_whose_program_failed_is_named_even_if_another_is_silent() -> None:
    echo = Echo()
    echo.size, echo.answer = 4, RuntimeError("gone")
    echo.rendezvous.words.update({1: "failed: the program failed on a", 2: "waited for AllReduce"})
    engine = engine_on(echo)
    submit(engine, staged(1), label="a", last=True)
    with pytest.raises(WireError, match=r"it failed\. Rank 1 failed: the program failed on a\. The job"):
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


@pytest.mark.parametrize("inline", [False, True])
def test_a_step_that_never_ends_is_an_error_in_time(inline: bool) -> None:
    engine = engine_on(Echo(limit=0.1), inline=inline)
    future = submit(engine, staged(2), label="a", last=False)
    with pytest.raises(WireError, match=r"last bucket did not arrive within 0\.1 s"):
        torch.futures.wait_all([future])  # in C++, as DDP waits
    with pytest.raises(WireError, match="last bucket did not arrive"):
        submit(engine, staged(1), label="b", last=True)
    engine.close()


@pytest.mark.parametrize("inline", [False, True])
def test_where_a_result_is_waited_for_all_before_it_ends_before_what_follows(inline: bool) -> None:
    """As a hook may do; in callbacks, on whichever thread they run, a wait changes nothing."""
    engine = engine_on(Echo(), inline=inline)
    counts = [2, 3, 2, 2, 3]
    futures = []
    for index, count in enumerate(counts):
        future = submit(engine, staged(count), label=f"bucket {index}", last=index == 4)
        futures.append(future.then(lambda done: done.wait() + 1).then(lambda done: done.value() + 1))
        if index == 1:
            assert futures[0].wait() == counts[0] + 2
        future.add_done_callback(lambda done: done.wait())
    engine.settle()
    assert [future.value().item() for future in futures] == [count + 2 for count in counts]
    (record,) = engine.stats().records
    dealt = [(bucket, stage) for bucket, stage, _ in record.order]
    assert dealt == order(counts[:2]) + [(bucket + 2, stage) for bucket, stage in order(counts[2:])]
    engine.close()


def test_an_error_in_a_callback_is_that_of_its_future() -> None:
    engine = engine_on(Echo())
    future = submit(engine, staged(1), label="a", last=True)
    failed = future.then(lambda done: dict[str, int]()["missing"])
    with pytest.raises(KeyError, match="missing"):
        failed.wait()
    assert future.wait() == 1
    engine.settle()
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

    def using(tensor: torch.Tensor) -> Collectives[torch.Tensor]:
        yield AllReduce(tensor)
        return torch.zeros(1)

    submit(engine, using(tensor), label="a", last=True)
    engine.settle()
    del tensor
    for _ in range(6000):  # the thread may need a moment to come back to its inbox
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None
    engine.close()


@pytest.mark.parametrize("inline", [False, True])
def test_programs_leave_autocast_and_its_weight_cache_as_they_were(inline: bool) -> None:
    """A weight that a forward uses twice is cast once, although programs run in between."""
    engine = engine_on(Echo(), inline=inline)
    weight, row = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = torch.nn.functional.linear(row, weight)
        submit(engine, staged(2), label="a", last=True)
        engine.settle()
        engine.close()  # its thread has ended
        second = torch.nn.functional.linear(row, weight)
        assert torch.is_autocast_enabled("cpu")
    assert first.dtype == second.dtype == torch.bfloat16
    assert _cast_of(first) is _cast_of(second)


def _cast_of(output: torch.Tensor) -> Any:
    """The node of the graph that cast the weight."""
    nodes = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node.name() == "ToCopyBackward0":
            return node
        nodes += [each for each, _ in node.next_functions] if node is not None else []
    raise AssertionError("nothing was cast")


class OnDevice(Echo):
    """A communicator as NCCL is: `wait` returns at once, and only `landed` tells if a collective ended."""

    def __init__(self, *, limit: float, ends: bool = False) -> None:
        super().__init__(limit=limit)
        self.ends, self.aborted = ends, threading.Event()
        self.looked = 0
        self.broken: str | None = None

    def in_any_order(self, op: object) -> bool:
        return False

    def issue(self, op: Any, turn: Any = None) -> Any:
        def landed() -> bool:
            self.looked += 1
            return self.ends or self.aborted.is_set()

        return SimpleNamespace(
            done=lambda: False, landed=landed, wait=lambda: op.tensor, complete=lambda: None
        )

    def failure(self) -> str | None:
        return self.broken

    def part(self) -> None:
        assert not self.aborted.is_set()

    def abort(self) -> None:
        self.aborted.set()


def on_device(stages: int) -> Collectives[torch.Tensor]:
    """A program whose tensors are not the CPU's, on a device without streams or values."""
    for _ in range(stages):
        yield AllReduce(torch.zeros(4, device="meta"))
    return torch.zeros(())


def test_a_rank_lost_on_an_accelerator_is_an_error_at_the_limit_with_its_name() -> None:
    """Its peers' collectives return at once and never end. A read of a value would block for good."""
    device = OnDevice(limit=0.3)
    engine = engine_on(device, inline=True)
    submit(engine, on_device(2), label="bucket 0 (w)", last=False)
    submit(engine, on_device(1), label="bucket 1 (b)", last=True)
    engine.guard()
    with pytest.raises(WireError) as caught:
        engine.settle()
    text = str(caught.value)
    for part in (
        "s for AllReduce",
        "at step 0, bucket 0 (w), stage 0, and it failed",  # the oldest, which the others wait for
        "Rank 1 did not respond",
        "did not end on the device within 0.3 s",
    ):
        assert part in text, text
    assert device.aborted.wait(60), "the communicator was not aborted"
    with pytest.raises(WireError, match="Rank 1"):
        submit(engine, on_device(1), label="next", last=True)
    engine.close()


def test_collectives_that_the_backend_itself_has_aborted_are_an_error() -> None:
    """They look as if they had ended, with whatever was in their tensors."""
    device = OnDevice(limit=60, ends=True)
    device.broken = "the backend reported COMM_ERROR"
    engine = engine_on(device, inline=True)
    submit(engine, on_device(1), label="bucket 0", last=True)
    with pytest.raises(WireError, match="COMM_ERROR"):
        engine.settle()
    engine.close()


def test_the_wire_thread_finds_a_lost_rank_while_the_host_blocks_elsewhere() -> None:
    device = OnDevice(limit=0.3)
    engine = engine_on(device, inline=True)
    submit(engine, on_device(1), label="bucket 0", last=True)
    assert device.aborted.wait(60), "the host would block in its own read of a value until then"
    with pytest.raises(WireError, match="did not end on the device"):
        engine.settle()
    engine.close()


def test_a_rank_that_reports_a_failure_is_not_waited_for_until_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It aborts its own communicator, which NCCL's peers do not notice."""
    monkeypatch.setattr("thinwire.engine.scheduler._ASK_SECONDS", 0.0)
    device = OnDevice(limit=10_000)
    device.rendezvous.words[1] = "failed: a defect in its program"
    engine = engine_on(device, inline=True)
    submit(engine, on_device(1), label="bucket 0", last=True)
    with pytest.raises(WireError, match=r"Rank 1 failed: a defect in its program\..*another rank has failed"):
        engine.settle()
    engine.close()


def test_a_device_that_still_computes_the_input_is_not_taken_for_a_lost_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host issues a step's collectives long before the device has computed the gradients."""
    computed = threading.Event()
    monkeypatch.setattr(SideStream, "mark", lambda self: SimpleNamespace(query=computed.is_set))
    monkeypatch.setattr(SideStream, "after", lambda self, event: None)
    device = OnDevice(limit=0.05)
    engine = engine_on(device, inline=True)
    submit(engine, on_device(1), label="bucket 0", last=True)
    looked = device.looked + 3
    while device.looked < looked:  # the wire thread looks, after the limit too
        time.sleep(0.01)
    engine.check()
    device.ends = True
    computed.set()
    engine.settle()
    engine.close()
