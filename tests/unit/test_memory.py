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
    with pytest.raises(StateError, match="parameters that this model has not: w"):
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


def test_residuals_of_models_are_in_no_scalers_units() -> None:
    memory = Memory()
    for scope in (memory, memory.scoped("slice 0 of 2"), memory.scoped("models").scoped("slice 0 of 2")):
        scope.slot("w", "residual", lambda: torch.ones(1))
    memory.rescale(2.0)
    memory.rescale(4.0)
    kept = memory.state_dict()["w"]
    assert {key: tensor.item() for key, tensor in kept.items()} == {
        "residual": 2.0,
        "slice 0 of 2: residual": 2.0,
        "models: slice 0 of 2: residual": 1.0,
    }
