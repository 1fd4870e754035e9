"""Lightning Fabric: `attach` after `setup`, and `State` for `fabric.save` and `fabric.load`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from thinwire.attach import attach as attach_ddp
from thinwire.checkpoint.gather import GatheredState
from thinwire.errors import AttachError
from thinwire.models.ddp.internals import called_module
from thinwire.models.ddp.model import require_ddp
from thinwire.models.ddp.unwrap import ddp_of
from thinwire.step.strategy import Attachable
from thinwire.strategies.schedule import Schedule
from thinwire.strategies.zero.zero import ZeRO
from thinwire.wire import Wire

__all__ = ["State", "attach"]


def attach(
    fabric: Fabric,
    model: nn.Module,
    program: Attachable | Schedule,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    **options: Any,
) -> Wire:
    """Exchange the gradients, or models, of a model of Fabric with `program`. Call it on every process.

    Under `ZeRO`, `fabric.clip_gradients(..., max_norm=...)` clips by the norm over all ranks, and
    `clip_val=...` works too. To save the wire, put a `State` into the dict that you pass to `fabric.save` and
    `fabric.load`.

    Args:
        fabric: The fabric that has set up the model, with the strategy `"ddp"`.
        model: The model that `fabric.setup` returned.
        program: A program, configuration or schedule, as for `thinwire.attach`.
        optimizer: The optimizer that `fabric.setup` returned. Averaged models and `ZeRO` need it.
        **options: Further options of `thinwire.attach`. The scaler is that of the fabric's precision.

    Returns:
        The wire.

    Raises:
        AttachError: The fabric uses no DDP, or has not set up the model.

    Example::

        model, optimizer = fabric.setup(model, optimizer)
        wire = thinwire.integrations.fabric.attach(fabric, model, Int8(), optimizer=optimizer)
        state = {"model": model, "optimizer": optimizer, "thinwire": thinwire.integrations.fabric.State(wire)}
        fabric.save(path, state)
    """
    try:
        ddp = ddp_of(model)
    except AttachError as error:
        raise AttachError(
            f"attach needs DDP, and the fabric's strategy is {type(fabric.strategy).__name__}: use"
            ' Fabric(strategy="ddp", devices=2) or more, and attach to the model of fabric.setup(). To'
            " shard the optimizer's state, use thinwire.ZeRO()"
        ) from error
    options.setdefault("scaler", _scaler_of(fabric))
    wire = attach_ddp(ddp, program, optimizer=optimizer, **options)
    if isinstance(wire.program, ZeRO):
        _clip_by_wire(fabric, ddp, wire)
    return wire


class State:
    """All ranks' state of a wire, for the dict passed to `fabric.save` and `fabric.load`.

    It includes the GradScaler of the fabric's precision, which Fabric does not save.

    Make it before `fabric.load`. Fabric loads the objects of a dict in any order, so a loaded state is
    applied in the model's next forward, after model and optimizer were loaded.

    Args:
        wire: The wire that `attach` returned.
        **extra: As for `GatheredState`.
    """

    def __init__(self, wire: Wire, **extra: Any) -> None:
        attached = wire.attachment("State")
        scaler = attached.scaler
        if isinstance(scaler, GradScaler):
            extra.setdefault("scaler", scaler)
        self._gathered = GatheredState(wire, **extra)
        self._loaded: Mapping[str, Any] | None = None
        module = called_module(require_ddp(attached.model, "State").ddp("State"))
        apply = torch.compiler.disable(lambda module, args: self.apply())
        # Fabric loads in the order of a set, which differs from rank to rank, and loading a wire is
        # collective. A forward is the first call that all ranks make in the same order. It runs before the
        # hooks of strategies.
        module.register_forward_pre_hook(apply, prepend=True)

    def apply(self) -> None:
        """Apply the deferred state. Every rank must call it, after model and optimizer were loaded."""
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self._gathered.load_state_dict(loaded)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks. Fabric calls it on every rank."""
        self.apply()
        return self._gathered.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a saved state until the next forward."""
        self._loaded = state


def _scaler_of(fabric: Fabric) -> Any:
    return getattr(fabric.strategy.precision, "scaler", None)


def _clip_by_wire(fabric: Fabric, ddp: nn.Module, wire: Wire) -> None:
    """Make `fabric.clip_gradients` clip this model's gradients, which `ZeRO` spreads over all ranks."""
    strategy = fabric.strategy
    by_norm, by_value = strategy.clip_gradients_norm, strategy.clip_gradients_value

    def clip_gradients_norm(
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        if _ddp_or_none(module) is not ddp:
            return by_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        strategy.precision.unscale_gradients(optimizer)
        norm = wire.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}: with a GradScaler, which skips such steps, call"
                " clip_gradients(..., error_if_nonfinite=False)"
            )
        return norm

    def clip_gradients_value(module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        by_value(module, optimizer, clip_val)
        if _ddp_or_none(module) is ddp:
            wire.clip_grad_norm_(math.inf)  # ZeRO then accepts the change

    strategy.clip_gradients_norm = clip_gradients_norm
    strategy.clip_gradients_value = clip_gradients_value


def _ddp_or_none(module: nn.Module) -> nn.Module | None:
    """Return the DDP model inside a module, or None if there is none."""
    try:
        return ddp_of(module)
    except AttachError:
        return None
