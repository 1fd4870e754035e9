"""Messages in the engine: which may leave the static order, and how their turns are told apart."""

import threading
import time
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.echo import Echo, Reply, engine_on, staged, submit
from thinwire import AllGather, AllReduce, Collectives
from thinwire.engine.comm.messages import tag_of
from thinwire.engine.comm.pending import PendingFuture
from thinwire.engine.ops import Await, Collective
from thinwire.engine.order import order


class Messages(Echo):
    """A peer whose replies take times of their own, and whose messages are matched by their turns."""

    def __init__(self, delays: list[float]) -> None:
        super().__init__()
        self._delays = delays
        self.turns: list[tuple[int, int] | None] = []

    def in_any_order(self, op: Collective) -> bool:
        return isinstance(op, AllGather)

    def issue(self, op: Collective | Await, turn: tuple[int, int] | None = None) -> Reply:
        assert isinstance(op, Collective)
        self.turns.append(turn)
        return Reply(op.tensor, self._delays[len(self.turns) % len(self._delays)])


def mixed(kinds: list[bool]) -> Collectives[torch.Tensor]:
    """Yield a message that may be taken in any order for each True, and a collective for each False."""
    for any_order in kinds:
        tensor = torch.zeros(4)
        yield AllGather(tensor, in_order=False) if any_order else AllReduce(tensor)
    return torch.tensor(float(len(kinds)))


@settings(max_examples=60, deadline=None)
@given(
    buckets=st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=6),
    delays=st.lists(st.sampled_from([0.0, 0.0005, 0.003]), min_size=1, max_size=5),
)
def test_messages_may_be_early_and_collectives_keep_the_static_order(
    buckets: list[list[bool]], delays: list[float]
) -> None:
    engine = engine_on(Messages(delays))
    futures = [
        submit(engine, mixed(kinds), label=f"bucket {index}", last=index == len(buckets) - 1)
        for index, kinds in enumerate(buckets)
    ]
    engine.settle()
    assert [future.wait().item() for future in futures] == [len(kinds) for kinds in buckets]
    (record,) = engine.stats().records
    taken = [(bucket, stage) for bucket, stage, _ in record.order]
    static = order([len(kinds) for kinds in buckets])
    assert sorted(taken) == sorted(static)
    assert [turn for turn in taken if not buckets[turn[0]][turn[1]]] == [
        turn for turn in static if not buckets[turn[0]][turn[1]]
    ]
    engine.close()


def test_a_message_is_followed_by_the_next_one_before_later_buckets_arrive() -> None:
    peer = Messages([0.001])
    engine = engine_on(peer)
    submit(engine, mixed([True, True, False]), label="first", last=False)
    deadline = time.monotonic() + 60
    while len(peer.turns) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert peer.turns == [(0, 0), (0, 1)], (
        "the collective waits for its turn, which comes after later buckets"
    )
    submit(engine, mixed([False]), label="second", last=True)
    engine.settle()
    assert peer.turns == [(0, 0), (0, 1), None, None]
    engine.close()


class Waiting(Echo):
    """A peer for programs that wait for a future of their own process."""

    def issue(self, op: Collective | Await, turn: tuple[int, int] | None = None) -> Any:
        return PendingFuture(op.future, self.limit) if isinstance(op, Await) else super().issue(op, turn)


def test_a_program_that_is_queued_while_the_wire_thread_takes_turns_is_not_forgotten() -> None:
    """The thread would wait for a future that only that program completes."""
    engine, returning, queued = engine_on(Waiting(limit=60, delay=0.05)), threading.Event(), threading.Event()
    scheduler, found = engine._scheduler, torch.futures.Future[torch.Tensor]()
    advance = scheduler.advance

    def paused(*, wait: bool) -> None:
        advance(wait=wait)
        if threading.current_thread() is engine._thread and not returning.is_set():
            returning.set()
            queued.wait(60)

    def waits() -> Collectives[torch.Tensor]:
        value: torch.Tensor = yield Await(found)
        return value

    def completes() -> Collectives[torch.Tensor]:
        found.set_result(torch.ones(()))
        yield AllReduce(torch.zeros(1))
        return torch.ones(())

    setattr(scheduler, "advance", paused)  # noqa: B010 - mypy does not allow the assignment
    submit(engine, staged(1), label="a", last=False)
    submit(engine, waits(), label="b", last=False)
    assert returning.wait(60)
    submit(engine, completes(), label="c", last=True)
    queued.set()
    engine.settle()
    engine.close()


@given(
    turns=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 7)), min_size=2, unique=True),
    words=st.lists(st.text(max_size=3), min_size=2),
)
def test_messages_of_different_turns_never_share_a_tag(
    turns: list[tuple[int, int]], words: list[str]
) -> None:
    """Ranks may issue them in different orders, and Gloo would mix them up."""
    tags = {turn: {tag_of(turn, word) for word in words} for turn in turns}
    assert len(set().union(*tags.values())) == sum(map(len, tags.values()))
    assert all(0 <= tag < 1 << 31 for own in tags.values() for tag in own)
    assert not set().union(*tags.values()) & {tag_of(None, word) for word in words}
