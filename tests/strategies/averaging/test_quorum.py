"""Averaged models among replicas that come and go. Whatever fails, the living end with the same model."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import thinwire
from tests.live_room import SET_UP, Fault, KilledError, Life, Room, model, run
from thinwire.strategies.averaging.handshake import Row, agree, decide, decoded

INT8 = thinwire.DiLoCo(4, program=thinwire.Int8())


def check_equal(lives: list[list[Life]], steps: int) -> list[Life]:
    """Return the replicas that have ended; all of them hold the same model, at the same step."""
    for each in lives:
        for life in each:
            assert life.error is None or isinstance(life.error, KilledError), repr(life.error)
    ended = [each[-1] for each in lives if each[-1].error is None]
    first = ended[0]
    for life in ended:
        assert life.wire.step == steps
        assert life.state.lineage == first.state.lineage
        anchors, firsts = life.replica.anchors, first.replica.anchors
        assert anchors is not None
        assert firsts is not None
        for name, parameter in life.replica.parameters.items():
            assert torch.equal(parameter, first.replica.parameters[name]), name
            assert torch.equal(anchors[name], firsts[name]), name
        for name, buffer in life.replica.buffers.items():
            assert torch.equal(buffer, first.replica.buffers[name]), name
    return ended


@pytest.mark.parametrize(
    "config",
    [
        thinwire.DiLoCo(4),
        INT8,
        thinwire.SparseLoCo(4, ratio=0.25),
        thinwire.DiLoCo(4, program=thinwire.PowerSGD(rank=2)),
        thinwire.DiLoCo(4, program=thinwire.Int4(), fragments=2, optimizer_state="reset"),
        thinwire.DiLoCo(2, program=thinwire.Int8(), outer=partial(torch.optim.SGD, lr=1), buffers="rank0"),
    ],
    ids=repr,
)
def test_replicas_end_equal_without_and_with_a_death(config: thinwire.DiLoCo) -> None:
    for faults in ((), (Fault(2, 1, 2),)):
        lives = run(Room(faults=faults), config, replicas=3, steps=12, returns={1: 1})
        ended = check_equal(lives, 12)
        assert len(ended) == 3
        assert [len(each) for each in lives] == [1, 1 + len(faults), 1]
        for life in (lives[0][0], lives[2][0]):
            assert life.uncommitted == len(faults), "a death costs one exchange"


faults = st.builds(
    Fault,
    round=st.integers(0, 7),
    place=st.integers(0, 3),
    call=st.integers(0, 8),
    dies=st.booleans(),
)


@settings(max_examples=10, deadline=None)
@given(
    faults=st.lists(faults, max_size=4),
    late=st.frozensets(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3),
)
@example(faults=[Fault(2, 0, 5, dies=False), Fault(2, 1, 5, dies=False)], late=frozenset())
def test_whatever_fails_the_living_end_equal(faults: list[Fault], late: frozenset[tuple[int, int]]) -> None:
    """A replica may come too late for any exchange but the last: the others do not wait for it forever."""
    room = Room(faults=tuple(faults), late=late)
    lives = run(room, INT8, replicas=4, steps=16, returns=dict.fromkeys(range(4), 4))
    assert len(check_equal(lives, 16)) == 4


class Watched(Life):
    """A replica that checks that a failed exchange changes nothing."""

    def held(self) -> dict[str, torch.Tensor]:
        residuals = {f"residual of {name}": one for name, one in self.residuals().items()}
        return residuals | {name: one.detach().clone() for name, one in self.replica.parameters.items()}

    def step(self) -> None:
        begin, before = self.seat.begin, dict[str, torch.Tensor]()

        def watched(limit: timedelta) -> None:
            before.update(self.held())
            begin(limit)

        failures = self.uncommitted
        with patch.object(self.seat, "begin", watched):
            super().step()
        if self.uncommitted > failures:
            after = self.held()
            assert "residual of 0.weight" in after
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], before[name]) for name in after)


def test_a_failed_exchange_leaves_residuals_and_parameters_as_they_were() -> None:
    with patch("tests.live_room.Life", Watched):
        lives = run(Room(faults=(Fault(3, 2, 3),)), INT8, replicas=3, steps=16)
    check_equal(lives[:2], 16)
    assert [life[0].uncommitted for life in lives[:2]] == [1, 1]


def test_a_replica_that_missed_the_commit_of_the_others_keeps_the_residual_of_what_it_sent() -> None:
    """Its peers used what it sent. With its old residual it would send a part of that again."""
    before, after = (run(Room(), INT8, replicas=2, steps=steps)[1][0].residuals() for steps in (4, 8))
    for call in range(2, 20):  # the last one that exists is the acknowledgement
        lives = run(Room(faults=(Fault(2, 1, call, dies=False),)), INT8, replicas=2, steps=8)
        check_equal(lives, 8)
        if lives[0][0].uncommitted == 0 and lives[1][0].uncommitted == 1:
            break
    else:
        pytest.fail("no collective whose loss lets one replica commit alone")
    healed = lives[1][0].residuals()
    assert healed.keys() == after.keys() != set()
    assert all(torch.equal(healed[name], after[name]) for name in after)
    assert not all(torch.equal(healed[name], before[name]) for name in before)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_newcomer_does_not_dilute_the_mean_and_keeps_the_step(mixing: float) -> None:
    """Of three replicas one is late for the first rounds: the others' mean is over two."""
    plain = thinwire.DiLoCo(4, outer=partial(torch.optim.SGD, lr=1), mixing=mixing)
    two = run(Room(), plain, replicas=2, steps=4)
    late = frozenset({(0, 2)})
    three = run(Room(late=late), plain, replicas=3, steps=4)
    check_equal(three, 4)
    for name, one in two[0][0].replica.parameters.items():
        torch.testing.assert_close(three[0][0].replica.parameters[name], one)


def test_the_residuals_of_the_dead_are_lost_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "thinwire"):
        run(Room(faults=(Fault(3, 1, 0),)), INT8, replicas=3, steps=16, returns={1: 1})
    lost = [one for one in caplog.messages if "left before" in one]
    assert lost
    assert all("replica 1.0 left before step" in one for one in lost), lost
    assert all("its residuals of 0.weight, 2.weight are lost" in one for one in lost), lost
    assert any("replica 1.1 joined at step" in one for one in caplog.messages)


def test_a_quorum_below_the_minimum_commits_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(minimum=2)
    room.expected = {0}
    life = Life(room, 0, 0, INT8)
    life.seat.patience = life.seat.patience / 40
    with caplog.at_level(logging.INFO, "thinwire"), pytest.raises(thinwire.WireError, match="at least 2"):
        life.wire.join()
    found = [one for one in caplog.messages if "it had 1 replicas, and commits need at least 2" in one]
    assert len(found) == 1, "once, and not at each of the many attempts"
    assert not life.membership.joined


def test_joining_has_one_time_limit_for_all_attempts() -> None:
    """The second attempt to reach a quorum has the time that the first one left, not the whole limit."""
    room = Room(minimum=2)
    room.expected = {0}
    life = Life(room, 0, 0, INT8)
    life.seat.patience = timedelta(seconds=40)
    clock, limits, begin = [1000.0], list[float](), life.seat.begin

    def slow(limit: timedelta) -> None:
        limits.append(limit.total_seconds())
        clock[0] += 24.0
        begin(limit)

    with (
        patch("thinwire.strategies.averaging.quorum.time.monotonic", lambda: clock[0]),
        patch("thinwire.strategies.averaging.quorum.time.sleep", lambda seconds: None),
        patch.object(life.seat, "begin", slow),
        pytest.raises(thinwire.WireError, match="within 40 s"),
    ):
        life.wire.join()
    assert limits == [40.0, 16.0]


def row(**changes: Any) -> Row:
    values = dict.fromkeys(("set_up", "lineage", "position", "step", "window", "nonce"), 4)
    return Row(**{**values, "final": False, "name": "a", **changes})


@given(
    st.builds(
        Row,
        **dict.fromkeys(("set_up", "lineage", "position", "step", "window", "nonce"), st.integers(0, 2**62)),
        final=st.booleans(),
        mixed=st.booleans(),
        name=st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=64),
    )
)
def test_a_row_survives_the_wire(one: Row) -> None:
    assert decoded(one.encoded(torch.device("cpu"))) == one


def test_the_roll_call_finds_what_differs() -> None:
    found = decide([row(), row(lineage=9, step=8), row(window=0)])
    assert (found.step, found.contributors) == (8, 2)
    assert found.stale == {1}
    assert not found.different
    assert found.blocked
    assert decide([row(lineage=9), row()]).stale == {1}, "of a tie the lowest rank's is kept"
    assert decide([row(set_up=9), row(), row()]).different == {0}
    assert not decide([row(final=True), row()]).final
    assert decide([row(nonce=1)]).exchange != decide([row(nonce=2)]).exchange


def test_a_replica_with_shards_of_two_histories_receives_a_state_again() -> None:
    """Whichever rank it has: the others must not take over such a mixture."""
    for rows in ([row(lineage=9, mixed=True), row()], [row(), row(lineage=9, mixed=True)]):
        assert decide(rows).stale == {place for place, one in enumerate(rows) if one.mixed}
    assert not decide([row(lineage=9, mixed=True)] * 2).blocked, "there is no other"


class TwoRanks:
    """The ranks of a replica, of which the second has other numbers."""

    def __init__(self, **second: int) -> None:
        self.second = second

    def gather(self, numbers: Sequence[int], step: int) -> list[list[int]]:
        names = ("connected", "lineage", "fingerprint", "step", "window", "final", "nonce")
        return [list(numbers), list({**dict(zip(names, numbers, strict=True)), **self.second}.values())]


def test_the_ranks_of_a_replica_send_the_same_row() -> None:
    def agreed(**second: int) -> Row | None:
        return agree(TwoRanks(**second), row(step=7), connected=True, fingerprint=0)

    def found(**second: int) -> Row:
        agreed_row = agreed(**second)
        assert agreed_row is not None
        return agreed_row

    assert not found().mixed
    assert agreed(connected=0) is None
    assert found(fingerprint=3).lineage != found().lineage
    mixed = found(lineage=5, step=9)
    assert (mixed.mixed, mixed.step) == (True, 9), "one rank has received a state, and the other has not"
    with pytest.raises(thinwire.MismatchError, match="at steps 7, 9"):
        agreed(step=9)


def test_a_replica_that_is_set_up_differently_raises_and_the_others_go_on() -> None:
    def life(room: Room, place: int, *args: Any) -> Life:
        return Life(room, place, *args, set_up={**SET_UP, "program": "LocalSGD"} if place == 2 else SET_UP)

    with patch("tests.live_room.Life", life):
        lives = run(Room(), INT8, replicas=3, steps=8)
    assert isinstance(lives[2][0].error, thinwire.MismatchError)
    assert "program: LocalSGD on this replica, DiLoCo on the peer" in str(lives[2][0].error)
    check_equal(lives[:2], 8)


def test_a_difference_that_the_roll_call_finds_is_named() -> None:
    """Replicas that resume at the same position receive no peer's state, which would show it before."""

    def life(room: Room, place: int, *args: Any) -> Life:
        made = Life(room, place, *args, set_up={**SET_UP, "option min_replicas": str(1 + (place == 1))})
        made.seat.position = 4
        made.state.steps.restore(4)
        return made

    with patch("tests.live_room.Life", life), patch("tests.live_room.model", lambda _: model(0)):
        lives = run(Room(), INT8, replicas=3, steps=8)
    assert isinstance(lives[1][0].error, thinwire.MismatchError)
    found = "option min_replicas: 1 on replica 0.0, replica 2.0, 2 on replica 1.0. Give all replicas"
    assert found in str(lives[1][0].error)
    check_equal([lives[0], lives[2]], 8)


def test_a_model_with_a_mask_of_minus_infinity_joins() -> None:
    def masked(seed: int) -> torch.nn.Module:
        made = model(seed)
        made.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        return made

    with patch("tests.live_room.model", masked):
        check_equal(run(Room(faults=(Fault(2, 1, 2),)), INT8, replicas=2, steps=8, returns={1: 1}), 8)


def frozen(seed: int) -> torch.nn.Module:
    made = model(seed)
    made[0].weight.requires_grad_(False)  # type: ignore[index]
    return made


def test_frozen_parameters_with_other_values_are_another_set_up() -> None:
    """No exchange would ever make them equal."""
    with patch("tests.live_room.model", frozen):
        lives = run(Room(), INT8, replicas=2, steps=8)
    assert isinstance(lives[1][0].error, thinwire.MismatchError)
    assert "hash of frozen parameters" in str(lives[1][0].error)
    with patch("tests.live_room.model", lambda seed: frozen(0)):
        check_equal(run(Room(), INT8, replicas=2, steps=8), 8)


def test_a_parameter_that_is_unfrozen_later_raises() -> None:
    room = Room()
    room.expected = {0}
    with patch("tests.live_room.model", frozen):
        life = Life(room, 0, 0, INT8)
    life.wire.join()
    life.step()
    life.module[0].weight.requires_grad_(True)  # type: ignore[index]
    with pytest.raises(thinwire.AttachError, match=r"'0.weight' was frozen .*unfreeze it before attach"):
        life.step()


@pytest.mark.parametrize("change", [{"step": -1}, {"outer": 3}, {"optimizers": [1]}, {"buffers": {}}, None])
def test_a_peers_state_that_does_not_fit_raises(change: Any) -> None:
    peer, own = (Life(Room(), place, 0, INT8).state for place in range(2))
    own.receive(peer.donate())
    own = Life(Room(), 1, 0, INT8).state
    with pytest.raises(thinwire.StateError):
        own.receive(peer.donate() | change if change else {"step": 1})


def test_other_orders_of_parameters_are_other_set_ups() -> None:
    """Replicas pack parameters in their order."""
    orders = ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    one, other = (Life(Room(), 0, 0, INT8, set_up=order).state for order in orders)
    with pytest.raises(thinwire.MismatchError, match="the order of parameters"):
        one.receive(other.donate())
