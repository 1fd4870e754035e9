"""Optimizer steps after an overflow: skipped without a GradScaler, or warned of where that is not possible.

An overflow sets all gradients to NaN on all ranks. A GradScaler then skips the optimizer's step. Without one,
step hooks hide the gradients from the optimizer, so that it changes neither parameters nor its own state.
Optimizers are those given to `attach`, and those of the model's parameters that are found when they step.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.amp.loss_scale import holds_any, living_scalers
from thinwire.engine.pack import local_part
from thinwire.programs.finite import all_true, finite

logger = logging.getLogger("thinwire")

NOT_ATTACHED = (
    "A torch-named hook skips no optimizer step: use a GradScaler, or thinwire.attach(ddp, program,"
    " optimizer=optimizer), which skips such steps"
)
STEPPED_IN_BACKWARD = (
    "The optimizer has stepped with them inside backward, where no step can be skipped: resume from a"
    " checkpoint, and step after backward, as ZeRO(interleaved=False) does"
)
_SEVERAL_BACKWARDS = (
    "LBFGS takes several backward passes in one step, which cannot be skipped: check the loss in its closure"
)
_HARMED = (
    "The update after it was not skipped, and parameters are non-finite now: resume from a checkpoint, and"
    " step with a torch.optim.Optimizer, or check the gradients before each update"
)


class Skipping:
    """The optimizers of one model, and what happens to their steps after an overflow.

    It keeps neither the model nor its optimizers alive. Until `watch` is called it knows no optimizer, as
    under torch-named hooks, and warns of the first overflow.
    """

    def __init__(self) -> None:
        self.overflows = 0
        """Number of backward passes that overflowed."""
        self.checks_every_step = False
        """Whether gradients are checked before each step, because no exchange checks them."""
        self.on_overflow: Callable[[], None] = lambda: None
        """Called if the check before a step finds non-finite gradients."""
        self.on_step: Callable[[Optimizer, bool], None] | None = None
        """Called before each step of an optimizer, with whether it holds parameters of this model."""
        self._parameters: frozenset[int] = frozenset()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._obstacle: str | None = NOT_ATTACHED
        self.skips = False
        """Whether steps of known optimizers are skipped after an overflow."""
        self.in_backward = False
        """Whether a step's gradients are being exchanged."""
        self._warned = self._overflowed = False
        self._handles: list[Any] = []

    def watch(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Iterable[torch.Tensor],
        *,
        skips: bool = True,
        obstacle: str | None = None,
    ) -> list[Any]:
        """Skip steps from now on, of these optimizers and of others that step these parameters.

        Args:
            optimizers: The optimizers given to `attach`.
            parameters: The model's parameters.
            skips: Whether overflowed steps are skipped, or warned of. False leaves both to the user.
            obstacle: The reason why no step can be skipped, for the warning.

        Returns:
            Handles that remove the hooks. Later hooks are added to the list.
        """
        self._parameters = frozenset(map(id, parameters))
        self.skips, self._warned, self._obstacle = skips and obstacle is None, not skips, obstacle
        self._handles.append(register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step)))
        for optimizer in optimizers:
            self._adopt(optimizer)
        return self._handles

    def settled(self, step: int, committed: bool, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """React to a settled backward, which was committed or has overflowed.

        Args:
            step: The number of the step.
            committed: Whether it was committed.
            tensors: Returns the model's parameters.
        """
        again, self._overflowed = self._overflowed, not committed
        if committed:
            return
        self.overflows += 1
        if self._warned:
            return
        reason = self._obstacle
        if reason is None and any(isinstance(optimizer, LBFGS) for optimizer in self._known):
            reason = _SEVERAL_BACKWARDS
        if reason is not None and living_scalers():  # which skip the step
            reason = None
        # An update without step hooks leaves parameters of NaN, so that the next backward overflows too.
        if reason is None and again and not _all_finite(tensors().values()):
            reason = _HARMED
        if reason is not None:
            self._warned = True
            logger.warning(
                "step %d overflowed: a gradient was infinite or NaN on some rank, so all gradients are NaN on"
                " all ranks. %s. Further overflows are logged at level INFO",
                step,
                reason,
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.in_backward:  # a copy of the optimizer steps one bucket, see `step_some`
            return
        own = optimizer in self._known
        if not own and holds_any(optimizer, self._parameters):
            self._adopt(optimizer)
            own = True
        if self.on_step is not None:
            self.on_step(optimizer, own)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Register hooks after all others of the optimizer, which see its gradients."""
        self._known.add(optimizer)
        if self.skips and not isinstance(optimizer, LBFGS):
            hooks = _StepHooks(self)
            self._handles += [
                optimizer.register_step_pre_hook(torch.compiler.disable(hooks.before)),
                optimizer.register_step_post_hook(torch.compiler.disable(hooks.after)),
            ]

    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return the gradients of this model's parameters that an optimizer holds."""
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [each.grad for each in held if each.grad is not None and id(each) in self._parameters]


class _StepHooks:
    """Step hooks of one optimizer, which hide its gradients during a step if they are of an overflow."""

    def __init__(self, skipping: Skipping) -> None:
        self._skipping = skipping
        self._cleared = 0
        """The number of overflows up to which no gradient of this optimizer is left."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hide gradients before a step; with a closure, after the backward that it runs."""
        self._show()  # a step that raised may have left some hidden
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._around(args[1], optimizer), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._around(kwargs["closure"], optimizer)}
        self._hide(optimizer)
        return None

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Restore the gradients after a step, as zeros if it was skipped."""
        self._show()

    def _around(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def checked() -> Any:
            self._show()
            loss = closure()
            self._hide(optimizer)
            return loss

        return checked

    def _hide(self, optimizer: Optimizer) -> None:
        if not self._overflowed(optimizer):
            return
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._hidden = [(parameter, parameter.grad) for parameter in held if parameter.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None
        # Some optimizers count their steps in the groups, with or without gradients.
        self._options = [(group, dict(group)) for group in optimizer.param_groups]

    def _overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether gradients of an overflow are left. The host reads them after an overflow only.

        They may be of an earlier backward than the latest, in parameters that the latest did not use. They
        may be gone, if the training loop has skipped the step by itself.
        """
        if "found_inf" in vars(optimizer):  # a GradScaler calls a fused optimizer, which skips by itself
            return False
        skipping = self._skipping
        if self._cleared == skipping.overflows and not skipping.checks_every_step:
            return False
        held = skipping.gradients(optimizer)
        if not held:
            return False
        if _all_finite(held):
            self._cleared = skipping.overflows
            return False
        if skipping.checks_every_step:
            skipping.on_overflow()
        return True

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            # As NaN, it would overflow the next exchange if the loop clears another optimizer's gradients
            # first. With two optimizers that overflow each other in turn, training would never recover.
            parameter.grad = gradient
            local_part(gradient.detach()).zero_()
        for group, options in self._options:
            group.update((name, value) for name, value in options.items() if name != "params")
        self._hidden, self._options = [], []


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors are finite. The host waits for the result."""
    parts = [local_part(tensor.detach()) for tensor in tensors]
    flags = [finite(part) for part in parts if part.is_floating_point() or part.is_complex()]
    return not flags or bool(all_true(flags).item())
