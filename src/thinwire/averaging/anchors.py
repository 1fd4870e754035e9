"""DiLoCo's memory: the parameters that all ranks last agreed on, and the outer optimizer that moves them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.averaging.saved import check_tensors, cloned
from thinwire.errors import StateError


class Anchors:
    """One anchor a parameter, by name, in fragments with an outer optimizer each.

    Anchors have at least float32's precision: outer steps are small.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        fragments: Sequence[Sequence[str]],
        outer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        self.fragments = fragments
        self._anchors = {name: _anchor(parameter) for name, parameter in parameters.items()}
        self._outers = [outer([self._anchors[name] for name in names]) for names in fragments]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._anchors[name].detach()

    def pseudo_gradients(
        self, fragment: int, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """How far the parameters have gone from where the anchor, in their own precision, had put them."""
        return {
            name: self[name].to(parameters[name].dtype).to(self[name].dtype) - parameters[name].detach()
            for name in self.fragments[fragment]
        }

    def step(self, fragment: int, means: Mapping[str, torch.Tensor]) -> None:
        """Move the anchors of a fragment by their mean pseudo-gradients."""
        for name in self.fragments[fragment]:
            self._anchors[name].grad = means[name]
        self._outers[fragment].step()
        self._outers[fragment].zero_grad()

    def move_to(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin anew from here; the outer optimizers keep their state."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                self._anchors[name].copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of it."""
        return {
            "anchors": {name: self[name].clone() for name in self._anchors},
            "outer": [cloned(outer.state_dict()) for outer in self._outers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; call it on new anchors, so that one that does not fit changes nothing."""
        check_tensors("anchor", state["anchors"], self._anchors)
        self.move_to(state["anchors"])
        for outer, saved in zip(self._outers, state["outer"], strict=True):
            outer.load_state_dict(cloned(saved))

    def rehearse(self) -> None:
        """Step once, on gradients of nothing: what the outer optimizers' state does, only they know."""
        for number, names in enumerate(self.fragments):
            self.step(number, {name: torch.zeros_like(self[name]) for name in names})
        check_tensors("anchor", {name: self[name] for name in self._anchors}, self._anchors)


def restored(make: Callable[[], Anchors], state: Mapping[str, Any]) -> Anchors:
    """New anchors with a saved state, which was tried on others first; StateError where it does not fit."""
    try:
        trial, anchors = make(), make()
        trial.load_state_dict(state)
        trial.rehearse()
        anchors.load_state_dict(state)
    except StateError:
        raise
    except Exception as error:  # of an optimizer that is not ours
        raise StateError(
            f"the state's anchors or outer optimizer do not fit ({type(error).__name__}: {error}): it was"
            " saved from another model, or with another outer optimizer"
        ) from error
    return anchors


def split_evenly(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names in so many fragments of about the same size, each in the order given.

    >>> split_evenly({"a": 5, "b": 3, "c": 3}, 2)
    [['a'], ['b', 'c']]
    """
    order = list(sizes)
    fragments: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(order, key=lambda name: -sizes[name]):
        min(fragments, key=lambda names: (sum(sizes[one] for one in names), len(names))).append(name)
    return [
        sorted(names, key=order.index) for names in sorted(fragments, key=lambda names: order.index(names[0]))
    ]


def _anchor(parameter: torch.Tensor) -> nn.Parameter:
    precise = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(precise, copy=True))
