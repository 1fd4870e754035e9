"""Averaged models among replicas that come and go. Whatever fails, the living end with the same model."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import thinwire
from tests.live_room import Fault, KilledError, Life, Room, run
from thinwire.strategies.live.roll_call import Row, decide, decoded
from thinwire.strategies.live.standing import Standing, agree

INT8 = thinwire.DiLoCo(4, program=thinwire.Int8())


def check_equal(lives: list[list[Life]], steps: int) -> list[Life]:
    """Return the replicas that have ended; all of them hold the same model, at the same step."""
    for each in lives:
        for life in each:
            assert life.error is None or isinstance(life.error, KilledError), repr(life.error)
    ended = [each[-1] for each in lives if each[-1].error is None]
    first = ended[0].replica
    for life in ended:
        assert life.replica.step == steps
        assert life.replica.lineage == first.lineage
        for name, one in life.replica.parameters.items():
            assert torch.equal(one, first.parameters[name]), name
            assert torch.equal(life.replica.anchors[name], first.anchors[name]), name
        for name, buffer in life.replica.buffers.items():
            assert torch.equal(buffer, first.buffers[name]), name
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

        def watched() -> None:
            before.update(self.held())
            begin()

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


def test_a_newcomer_does_not_dilute_the_mean_and_keeps_the_step() -> None:
    """Of three replicas one is late for the first rounds: the others' mean is over two."""
    plain = thinwire.DiLoCo(4, outer=partial(torch.optim.SGD, lr=1))
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
        life.averager.join()
    assert any("it had 1 replicas, and commits need at least 2" in one for one in caplog.messages)
    assert not life.averager.joined


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


def test_the_ranks_of_a_replica_tell_the_others_the_same() -> None:
    replica = Life(Room(), 0, 0, INT8).replica
    replica.step = 7

    def standing(**second: int) -> Standing:
        return agree(TwoRanks(**second), replica, connected=True, final=False, check=False)

    assert not standing().mixed
    assert not standing(connected=0).connected
    assert standing(fingerprint=3).lineage != standing().lineage
    mixed = standing(lineage=5, step=9)
    assert (mixed.mixed, mixed.step) == (True, 9), "one rank has received a state, and the other has not"
    with pytest.raises(thinwire.MismatchError, match="at steps 7, 9"):
        standing(step=9)


def test_a_replica_that_is_set_up_differently_raises_and_the_others_go_on() -> None:
    def life(room: Room, place: int, *args: Any) -> Life:
        return Life(room, place, *args, set_up=8 if place == 2 else 7)

    with patch("tests.live_room.Life", life):
        lives = run(Room(), INT8, replicas=3, steps=8)
    assert isinstance(lives[2][0].error, thinwire.MismatchError)
    assert "set up differently" in str(lives[2][0].error)
    check_equal(lives[:2], 8)
