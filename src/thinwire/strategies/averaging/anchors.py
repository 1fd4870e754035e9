"""DiLoCo's anchors, the copies of parameters that are equal on all ranks, and their outer optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.checkpoint.trees import copied
from thinwire.checkpoint.validate import check_tensors
from thinwire.errors import StateError


class Anchors:
    """Anchors by parameter name, in fragments with one outer optimizer each.

    Anchors have at least float32's precision, because outer steps are small: in bf16 most of them would round
    to nothing.

    Args:
        parameters: The parameters by name, whose values the anchors start from.
        fragments: The names in each fragment.
        outer: A function that makes an outer optimizer from a list of anchors.
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

    def tune(self, fragment: int, options: Mapping[str, float]) -> None:
        """Set options of a fragment's outer optimizer, such as its learning rate."""
        for group in self._outers[fragment].param_groups:
            group.update(options)

    def step(self, fragment: int, means: Mapping[str, torch.Tensor]) -> None:
        """Move the anchors of a fragment by their mean pseudo-gradients."""
        for name in self.fragments[fragment]:
            self._anchors[name].grad = means[name]
        self._outers[fragment].step()
        self._outers[fragment].zero_grad()

    def move_to(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the anchors to these values. The outer optimizers keep their state."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                self._anchors[name].copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the anchors and of the outer optimizers' state."""
        return {
            "anchors": {name: self[name].clone() for name in self._anchors},
            "outer": [copied(outer.state_dict()) for outer in self._outers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Call it on new anchors, as a state that does not fit may be partly loaded."""
        check_tensors("anchor", state["anchors"], self._anchors)
        self.move_to(state["anchors"])
        for outer, saved in zip(self._outers, state["outer"], strict=True):
            outer.load_state_dict(copied(saved))

    def rehearse(self) -> None:
        """Step once on zero gradients, because only an optimizer itself can validate its state."""
        for number, names in enumerate(self.fragments):
            self.step(number, {name: torch.zeros_like(self[name]) for name in names})
        check_tensors("anchor", {name: self[name] for name in self._anchors}, self._anchors)


def restored(make: Callable[[], Anchors], state: Mapping[str, Any]) -> Anchors:
    """Return new anchors with a saved state, after a trial step on a copy.

    Args:
        make: A function that makes new anchors.
        state: A saved state of anchors.

    Raises:
        StateError: The state does not fit.
    """
    try:
        trial, anchors = make(), make()
        trial.load_state_dict(state)
        trial.rehearse()
        anchors.load_state_dict(state)
    except StateError:
        raise
    except Exception as error:  # any, from the user's own optimizer
        raise StateError(
            f"the state's anchors or outer optimizer do not fit ({type(error).__name__}: {error}): it was"
            " saved from another model, or with another outer optimizer"
        ) from error
    return anchors


def split_evenly(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split names into `count` fragments of about the same size, each in the order given.

    >>> split_evenly({"a": 5, "b": 3, "c": 3}, 2)
    [['a'], ['b', 'c']]
    """
    place = {name: number for number, name in enumerate(sizes)}
    fragments: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        smallest = min(range(count), key=lambda number: (filled[number], len(fragments[number])))
        fragments[smallest].append(name)
        filled[smallest] += sizes[name]
    in_order = [sorted(names, key=place.__getitem__) for names in fragments]
    return sorted(in_order, key=lambda names: place[names[0]])


def _anchor(parameter: torch.Tensor) -> nn.Parameter:
    precise = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(precise, copy=True))
