"""Drop-in replacement for `torch.distributed.optim.post_localSGD_optimizer`.

Differences from torch:

- It is a complete optimizer, with defaults, step hooks and closures.
- Its `param_groups` are always the wrapped optimizer's, so LR schedulers still work after `load_state_dict`.
- With a GradScaler, a rank whose gradients overflow still averages with the others.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from thinwire.amp.skipped_steps import wrapped_step
from thinwire.codecs.checks import is_whole
from thinwire.errors import OptionError, StateError
from thinwire.step.autograd import share_state_hooks

_STEP = "step"


class Averager(Protocol):
    """Protocol of model averagers: thinwire's, torch's or your own."""

    step: int

    def average_parameters(self, params: Any) -> Any:
        """Average parameters if they are due, and count the step."""


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """An optimizer that makes local steps and averages parameters when its averager decides to.

    Args:
        optim: Optimizer that makes the local steps.
        averager: Decides when to average, and over which ranks. With `post_localSGD_hook`, set its
            `warmup_steps` to the hook's `start_localSGD_iter`.

    Raises:
        OptionError: If `optim` is not an optimizer or `averager` not an averager.

    Example::

        averager = PeriodicModelAverager(period=4, warmup_steps=100)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01), averager)
        for batch in batches:
            optimizer.zero_grad()
            ddp(batch).backward()
            optimizer.step()
    """

    _step_supports_amp_scaling = True

    def __init__(self, optim: torch.optim.Optimizer, averager: Averager) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise OptionError(f"optim={optim!r} must be a torch.optim.Optimizer, which makes the local steps")
        if not callable(getattr(averager, "average_parameters", None)) or not hasattr(averager, _STEP):
            raise OptionError(
                f"averager={averager!r} must be a ModelAverager, such as PeriodicModelAverager(period=4)"
            )
        super().__init__(optim.param_groups, optim.defaults)  # the properties below discard these copies
        self.optim = optim
        self.averager = averager
        share_state_hooks(self, optim)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.optim, self.averager)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def _made(self) -> bool:
        return "optim" in self.__dict__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._made:
            self.optim.param_groups = groups

    @property
    def state(self) -> "defaultdict[torch.Tensor, Any]":
        """The wrapped optimizer's state."""
        return self.optim.state

    @state.setter
    def state(self, state: "defaultdict[torch.Tensor, Any]") -> None:
        if self._made:
            self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._made:
            self.optim.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with the averager's step count under "step"."""
        return {**self.optim.state_dict(), _STEP: self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer and the averager's step count.

        Args:
            state_dict: State of a PostLocalSGDOptimizer. Without a step count, warn and count from 0.

        Raises:
            StateError: If the step count is not a whole number of at least 0.
        """
        step = state_dict.get(_STEP, 0)
        if not is_whole(step) or step < 0:
            raise StateError(
                f"step={step!r} must be a whole number, at least 0, the averager's count: the state was not"
                " saved from a PostLocalSGDOptimizer"
            )
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != _STEP})
        self.averager.step = step
        if _STEP not in state_dict:
            warnings.warn(
                'the loaded state_dict has no "step", so the averager counts from 0, warm-up included: save'
                " the state_dict of a PostLocalSGDOptimizer, or set averager.step",
                stacklevel=2,
            )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a local step, then average parameters if they are due.

        Args:
            closure: Computes the loss again, as in `torch.optim`.

        Returns:
            The closure's loss, or None.
        """
        arguments = () if closure is None else (closure,)
        loss: float | None = wrapped_step(self, self.optim, *arguments)
        self.averager.average_parameters(params=self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer. Every rank must do so at the same point."""
        if self._made:
            self.optim.add_param_group(param_group)
