"""Memory: slots by parameter, staged, committed or rolled back with a step, saved and loaded."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import Memory, StateError

anything = st.recursive(
    st.none() | st.integers() | st.text() | st.just(torch.zeros(1)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def remembering(value: float) -> Memory:
    memory = Memory()
    memory.slot("w", "residual", lambda: torch.full((2,), value))
    return memory


def test_a_state_goes_from_one_memory_to_another_by_value() -> None:
    source, target = remembering(1), remembering(2)
    target.load_state_dict(source.state_dict(), shapes={"w": torch.Size((2,))})
    source.slot("w", "residual", lambda: torch.zeros(2)).zero_()
    assert target.slot("w", "residual", lambda: torch.zeros(2)).tolist() == [1, 1]


def test_parameters_of_another_model_are_refused_by_name() -> None:
    target = remembering(2)
    with pytest.raises(StateError, match="parameters that this model does not have: w"):
        target.load_state_dict(remembering(1).state_dict(), shapes={"other": torch.Size((2,))})
    assert target.slot("w", "residual", lambda: torch.zeros(2)).tolist() == [2, 2]


@given(anything | st.dictionaries(st.just("w"), anything))
def test_whatever_is_loaded_either_fits_or_changes_nothing(state: object) -> None:
    target = remembering(2)
    try:
        target.load_state_dict(state, shapes={"w": torch.Size((2,))})
    except StateError:
        assert target.state_dict()["w"]["residual"].tolist() == [2, 2]
    else:
        assert target.state_dict().keys() <= {"w"}


def test_a_residual_of_another_shape_is_refused() -> None:
    memory = Memory()
    memory.slot("w", "residual", lambda: torch.zeros(1))
    with pytest.raises(StateError, match=r"the residual of w has shape \(1,\), the parameter \(2,\)"):
        Memory().load_state_dict(memory.state_dict(), shapes={"w": torch.Size((2,))})


def kept(memory: Memory, key: str = "residual") -> list[float]:
    found = memory.find(("w", key))
    return [] if found is None else found.tolist()


def test_what_a_step_changes_holds_when_it_counts() -> None:
    memory = remembering(1.0)
    for commits in (False, True):
        staged = memory.staged()
        staged.slot("w", "residual", lambda: torch.zeros(2)).add_(1)  # in place, as a user's program does
        staged.put("w", "factor", torch.ones(3))
        staged.scoped("slice").put("w", "residual", torch.ones(1))
        assert kept(memory) == [1, 1], "before the step has ended"
        if commits:
            staged.commit()
        else:
            staged.forget()
            assert memory.state_dict().keys() == {"w"}
            assert memory.state_dict()["w"].keys() == {"residual"}
    assert kept(memory) == [2, 2]
    assert kept(memory, "factor") == [1, 1, 1]
    assert kept(memory, "slice: residual") == [1]


def test_a_step_sees_its_own_changes() -> None:
    staged = remembering(1.0).staged()
    assert staged.read("w", "residual", lambda: torch.zeros(2)).tolist() == [1, 1]
    staged.put("w", "residual", torch.full((2,), 5.0))
    assert staged.read("w", "residual", lambda: torch.zeros(2)).tolist() == [5, 5]
    assert staged.slot("w", "residual", lambda: torch.zeros(2)).tolist() == [5, 5]


def test_parameters_that_were_left_out_keep_what_they_had() -> None:
    memory = remembering(1.0)
    staged = memory.staged()
    staged.put("w", "residual", torch.zeros(2))
    staged.put("v", "residual", torch.ones(1))
    staged.commit(but_of={"w"})
    assert kept(memory) == [1, 1]
    assert memory.find(("v", "residual")) is not None


@pytest.mark.parametrize("counts", [True, False])
def test_between_steps_each_slot_takes_its_memory_once(counts: bool) -> None:
    memory = remembering(1.0)
    kept_before = memory.find(("w", "residual"))
    assert kept_before is not None
    staged = memory.staged()
    staged.put("w", "residual", torch.full((2,), 2.0))
    changed = staged.find(("w", "residual"))
    assert changed is not None
    assert kept_before.tolist() == [1, 1], "it is not written to before the commit"
    old, new = weakref.ref(kept_before), weakref.ref(changed)
    del kept_before, changed
    if counts:
        staged.commit()
    else:
        staged.forget()
    assert (old() is None, new() is None) == (counts, not counts)


def test_residuals_follow_the_scale_of_gradients() -> None:
    memory = remembering(3.0)
    memory.put("w", "factor", torch.ones(1))
    memory.scoped("models").put("w", "residual", torch.ones(1))
    memory.scoped("slice 0 of 2").put("w", "residual", torch.ones(1))
    memory.rescale(torch.tensor(1024.0))  # the first that is known: they are in its units
    assert kept(memory) == [3, 3]
    memory.rescale(torch.tensor(512.0))
    memory.rescale(None)  # a step without a scaler
    assert kept(memory) == [1.5, 1.5]
    assert kept(memory, "slice 0 of 2: residual") == [0.5]
    assert kept(memory, "models: residual") == [1], "models are not scaled"
    assert kept(memory, "factor") == [1], "only residuals have units"
    assert memory.scale == 512.0


def test_residuals_of_models_are_in_no_scalers_units() -> None:
    memory = Memory()
    for scope in (memory, memory.scoped("slice 0 of 2"), memory.scoped("models").scoped("slice 0 of 2")):
        scope.slot("w", "residual", lambda: torch.ones(1))
    memory.rescale(torch.tensor(2.0))
    memory.rescale(torch.tensor(4.0))
    kept = memory.state_dict()["w"]
    assert {key: tensor.item() for key, tensor in kept.items()} == {
        "residual": 2.0,
        "slice 0 of 2: residual": 2.0,
        "models: slice 0 of 2: residual": 1.0,
    }
