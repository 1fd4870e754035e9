"""Compressed reduce-scatter within an FSDP2 model, for slow links between its shards.

There is no error feedback: a residual would be as large as the whole model, on every rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.codecs.codec import Codec, require_codec
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.rounding import divide_in_place
from thinwire.engine.comm.borrowed_group import run_blocking
from thinwire.engine.ops import Collective, Collectives, mapped
from thinwire.errors import AttachError, UnavailableError
from thinwire.models.fsdp import internals
from thinwire.programs.coding import seeded
from thinwire.programs.reduce_scatter import reduce_scatter


class CompressedReduceScatter:
    """A reduce-scatter of encoded gradients, in the form that `FSDPModule.set_custom_reduce_scatter` takes.

    Attributes:
        bytes_sent: Bytes that this rank has sent by it so far.
    """

    def __init__(self, codec: Codec) -> None:
        self.bytes_sent = 0
        self._codec = codec
        self._calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce gradients over the shards, each to its owner.

        Args:
            output_tensor: The tensor for this rank's shard.
            input_tensor: This rank's gradients of all shards, one after another.
            group: The ranks that hold the shards.
            op: Sum or mean.
            async_op: Unused: the result is ready when this returns.

        Raises:
            UnavailableError: `op` is neither sum nor mean.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnavailableError(
                f"FSDP asks for a reduce-scatter by {op}, as after set_gradient_divide_factor: call"
                " model.set_force_sum_reduction_for_comms(True), and FSDP divides itself"
            )
        # All ranks make the same calls in the same order, so all derive the same seeds from their number.
        codecs = seeded(self._codec, group.size(), self._calls)
        self._calls += 1
        shards = input_tensor.view(group.size(), -1)
        total = run_blocking(self._counted(reduce_scatter(codecs, group.rank(), list(shards)), group), group)
        output_tensor.copy_(divide_in_place(total, group.size()) if op == dist.ReduceOp.AVG else total)

    def _counted(
        self, steps: Collectives[torch.Tensor], group: dist.ProcessGroup
    ) -> Collectives[torch.Tensor]:
        def count(op: Collective) -> Collective:
            self.bytes_sent += op.bytes_sent(group.rank(), group.size())
            return op

        return mapped(steps, count)


def compress_reduce_scatter(model: nn.Module, codec: Codec | None = None) -> CompressedReduceScatter:
    """Compress the gradients that an FSDP2 model exchanges between its own shards.

    FSDP then gathers parameters in full precision as before, and reduces gradients in a fraction of the
    bytes. A rank's gradients of its own shard are not sent, and stay exact. There is no error feedback, so
    choose a precise codec. Call it on every rank, before training. It
    can be combined with `attach`, which compresses the exchange with other replicas.

    Args:
        model: The root module.
        codec: How gradients are encoded, such as `Cast(torch.bfloat16)`. Default: `Quantize(bits=8)`.

    Returns:
        The reduce-scatter, whose `bytes_sent` counts what this rank has sent.

    Raises:
        OptionError: `codec` is not a codec.
        AttachError: `fully_shard` was not called on any module of the model.
        UnavailableError: A module is sharded along several meshes.

    Example::

        sent = thinwire.compress_reduce_scatter(model)
        ...  # train as before
        print(sent.bytes_sent)
    """
    codec = Quantize(bits=8) if codec is None else codec
    require_codec(codec)
    modules = internals.sharded_modules(model)
    if not modules:
        raise AttachError(
            f"{type(model).__name__} is not sharded: call torch.distributed.fsdp.fully_shard on it first"
        )
    made = CompressedReduceScatter(codec)
    for module in modules:
        if len(internals.parameter_groups(module)) > 1:
            raise UnavailableError(
                f"{type(module).__name__} is sharded along several meshes, for which FSDP accepts no"
                " reduce-scatter: call fully_shard with one mesh for all modules"
            )
        module.set_custom_reduce_scatter(made)
    return made
