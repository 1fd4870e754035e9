"""ZeRO: every parameter has one owner, who alone keeps its optimizer state."""

from dataclasses import dataclass, field

import torch

from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.program import Program, require_program


@dataclass(frozen=True)
class ZeRO:
    """Gradients go to the owners of their parameters; owners step them, and send them back to all.

        each rank receives the mean gradients of what it owns          (W-1)/W of the model's bytes
        it steps those, with optimizer state for those alone
        every rank receives all updated parameters                     (W-1)/W

    Plain DDP sends 2 (W-1)/W and keeps the whole optimizer state on every rank; with torch's
    ZeroRedundancyOptimizer it is 3 (W-1)/W. Use it with any `torch.optim` optimizer over all parameters.

    Args:
        program: How gradients travel: `Exact()`, or any codec's program, such as `BF16()` and `Int8()`. Other
            programs run whole, so they send what they always do.
        parameters: How updated parameters travel: None, as they are; or torch.bfloat16, to which all ranks
            then round them, while owners keep what was rounded off.
        interleaved: Whether to step each bucket's parameters as soon as its gradients are there, inside
            backward, so that both exchanges overlap with it; `optimizer.step()` then does nothing. Otherwise
            it steps as ever, and parameters travel at its end. With the step inside backward there is no
            moment for a GradScaler, for gradient clipping, or for a closure; every backward is a step; and an
            optimizer must keep all it counts by parameter, as torch's do.
        shard_buckets: Whether neighbouring parameters go to different owners, so that every bucket has work
            for all; otherwise about a bucket at a time goes to one.

    Rajbhandari, Rasley, Ruwase, He: ZeRO, https://arxiv.org/abs/1910.02054.

    Example::

        wire = thinwire.attach(ddp, thinwire.ZeRO(thinwire.BF16()), optimizer=optimizer)
    """

    program: Program = field(default_factory=Exact)
    parameters: torch.dtype | None = None
    interleaved: bool = False
    shard_buckets: bool = True

    def __post_init__(self) -> None:
        require_program(self.program)
        if self.parameters not in (None, torch.bfloat16):
            raise OptionError(
                f"parameters={self.parameters!r} must be None or torch.bfloat16, in which updated parameters"
                " travel: other types have not the range of float32"
            )
        for name in ("interleaved", "shard_buckets"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r} must be True or False")
