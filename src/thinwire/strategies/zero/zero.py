"""The configuration of ZeRO. Every parameter has one owner, which alone keeps its optimizer state."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.amp import GradScaler

from thinwire.errors import OptionError
from thinwire.models.ddp.model import require_ddp
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import describe
from thinwire.programs.program import Program
from thinwire.programs.wrapper import adapt
from thinwire.step.strategy import Configuration, Context, Strategy, Target
from thinwire.strategies.zero.assignment import owners


@dataclass(frozen=True, repr=False)
class ZeRO(Configuration):
    """Sharded optimizer state. Owners receive gradients, step their parameters, and send these to all ranks.

        each rank receives the mean gradients of its own parameters    (W-1)/W of the model's bytes
        it steps those, and keeps optimizer state only for those
        every rank receives all updated parameters                     (W-1)/W

    Plain DDP sends 2 (W-1)/W and keeps the whole optimizer state on every rank. torch's
    ZeroRedundancyOptimizer sends 3 (W-1)/W. Use it with any `torch.optim` optimizer over all parameters.

    Args:
        program: The program for gradients: `Exact()`, or any codec's program, such as `BF16()` and `Int8()`.
            Other programs run as an all-reduce, so sharding saves no gradient bytes with them.
        parameters: The dtype in which updated parameters are sent. None keeps their own. With torch.bfloat16
            all ranks use the rounded parameters, and owners keep the unrounded ones for their next step.
        interleaved: Whether to step each bucket's parameters inside backward, as soon as its gradients are
            reduced, so that both exchanges overlap with backward. `optimizer.step()` then does nothing, and
            every backward is a step. GradScalers, gradient clipping and closures are not available, and the
            optimizer must keep its step counts by parameter, as torch's do. If False, `optimizer.step()`
            steps as usual, and parameters are sent at its end.
        shard_buckets: Whether neighbouring parameters have different owners, so that every bucket has work
            for all ranks. If False, runs of about a bucket have one owner.

    Raises:
        OptionError: An option has a wrong type or value.

    Rajbhandari, Rasley, Ruwase, He: ZeRO, https://arxiv.org/abs/1910.02054.

    Example::

        wire = thinwire.attach(ddp, thinwire.ZeRO(thinwire.BF16()), optimizer=optimizer)
    """

    swappable: ClassVar[bool] = False
    fixed_because: ClassVar[str] = (
        "under ZeRO owners keep the optimizer's state, so it begins and ends with the DDP model: load the"
        " result of wire.consolidate_optimizer_state() on every rank, and wrap the module in a new"
        " DistributedDataParallel"
    )
    exchanges_parameters: ClassVar[bool] = True
    optimizer_state_differs: ClassVar[bool] = True

    program: Program = field(default_factory=Exact)
    parameters: torch.dtype | None = None
    interleaved: bool = False
    shard_buckets: bool = True

    def __post_init__(self) -> None:
        adapt(self, "program")
        if self.parameters not in (None, torch.bfloat16):
            raise OptionError(
                f"parameters={self.parameters!r} must be None or torch.bfloat16, the dtype in which updated"
                " parameters are sent: other types do not have the range of float32"
            )
        for name in ("interleaved", "shard_buckets"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r} must be True or False")

    @property
    def steps_in_backward(self) -> bool:
        """True if owners step each bucket inside backward."""
        return self.interleaved

    def validate(self, target: Target) -> None:
        """Check the configuration against a model before anything is changed or sent.

        Raises:
            OptionError: The optimizers, audits, scaler or unused parameters do not work with sharding.
        """
        model = require_ddp(target.model, repr(self))
        if len(target.optimizers) != 1:
            raise OptionError(
                f"{self!r} shards one optimizer's state, and {len(target.optimizers)} were passed: pass one,"
                " as in attach(ddp, ..., optimizer=optimizer), with parameter groups for options that differ"
            )
        if isinstance(target.optimizers[0], torch.optim.LBFGS):
            raise OptionError("optimizer=LBFGS searches along all parameters at once: it cannot be sharded")
        self._check_parameters(target)
        if self.interleaved and isinstance(target.scaler, GradScaler) and target.scaler.is_enabled():
            raise OptionError(
                f"scaler={type(target.scaler).__name__} cannot unscale gradients before {self!r} steps, which"
                " is inside backward: train in bf16 without one, or use interleaved=False"
            )
        if self.interleaved and model.find_unused_parameters:
            raise OptionError(
                "interleaved=True cannot distinguish unused parameters from zero gradients, as DDP does after"
                " backward: use interleaved=False with find_unused_parameters"
            )
        if target.audits:
            raise OptionError(
                f"audit_every cannot audit {self!r}, because each rank has the means of its own parameters"
                " only: audit the same program without ZeRO"
            )
        describe(self)
        self.program.check(target.trained_shapes(), model.group.size())

    def _check_parameters(self, target: Target) -> None:
        """Raise OptionError if the optimizer misses parameters."""
        (optimizer,) = target.optimizers
        trained = super().stepped_here(target)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        left_out = [name for name, parameter in trained.items() if id(parameter) not in held]
        if left_out:
            shown = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
            raise OptionError(
                f"optimizer={type(optimizer).__name__} does not hold {shown}: under ZeRO other optimizers"
                " would step these on their owners alone; pass one optimizer over all trainable parameters,"
                " with parameter groups for options that differ, or freeze them"
            )

    def stepped_here(self, target: Target) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that this rank owns, by name."""
        model = target.model
        sizes = {name: parameter.numel() for name, parameter in model.parameters().items()}
        owner = owners(sizes, model.group.size(), spread=self.shard_buckets)
        trained = super().stepped_here(target)
        return {name: own for name, own in trained.items() if owner[name] == model.group.rank()}

    def bind(self, context: Context) -> Strategy:
        """Return the `Sharder` that runs this configuration."""
        from thinwire.strategies.zero.sharder import Sharder  # imports this module

        return Sharder(self, context)

    def gradient_program(self) -> Program:
        """Return the program that reduces gradients to their owners."""
        return self.program

    def with_gradient_program(self, program: Program) -> Configuration:
        """Return the same configuration with another program for gradients."""
        return replace(self, program=program)
