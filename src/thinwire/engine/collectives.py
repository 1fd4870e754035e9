"""Collectives as calls of torch.distributed, on tensors of dtypes that every backend supports."""

import torch
import torch.distributed as dist

from thinwire.engine.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Reduce,
    ReduceScatter,
)
from thinwire.engine.pending import Issued, Pending
from thinwire.errors import ProgramError

# torch 2.13 renamed these two and warns about the old names; older versions have only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start(op: Collective, group: dist.ProcessGroup, size: int) -> Pending:
    """Start a collective on a group of torch.distributed, and return without waiting for it."""
    tensor = op.tensor if op.tensor.dtype in PLAIN else carrier(op)
    match op:
        case AllReduce():
            return Issued([dist.all_reduce(tensor, group=group, async_op=True)], lambda: op.tensor)
        case AllGather():
            gathered = op.tensor.new_empty((size, *op.tensor.shape))
            work = _all_gather(as_carrier(tensor, gathered).flatten(), tensor.flatten(), group, True)
            return Issued([work], lambda: gathered)
        case AllToAll():
            received = torch.empty_like(op.tensor)
            work = dist.all_to_all_single(as_carrier(tensor, received), tensor, group=group, async_op=True)
            return Issued([work], lambda: received)
        case Exchange(sends=sends, receives=receives):
            pieces = op.tensor.new_empty(sum(receives))
            work = dist.all_to_all_single(
                as_carrier(tensor, pieces), tensor, list(receives), list(sends), group=group, async_op=True
            )
            return Issued([work], lambda: pieces)
        case ReduceScatter() if tensor.device.type == "cpu":
            # Gloo's own reduce-scatter sends as much as an all-reduce.
            rows = torch.empty_like(op.tensor)
            work = dist.all_to_all_single(as_carrier(tensor, rows), tensor, group=group, async_op=True)
            return Issued([work], lambda: rows.sum(0, dtype=rows.dtype))
        case ReduceScatter():
            own = torch.empty_like(op.tensor[0])
            work = _reduce_scatter(as_carrier(tensor, own), tensor, group=group, async_op=True)
            return Issued([work], lambda: own)
        case Reduce(dst=dst):
            work = dist.reduce(tensor, group=group, group_dst=dst, async_op=True)
            return Issued([work], lambda: op.tensor)
        case Broadcast(src=src):
            work = dist.broadcast(tensor, group=group, group_src=src, async_op=True)
            return Issued([work], lambda: op.tensor)
    raise ProgramError(f"{op} is not a supported collective: see thinwire.engine.ops")


PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int64}
"""Dtypes that every backend sends and adds as they are."""


def check_dtype(op: Collective) -> None:
    """Raise ProgramError for a sum of numbers that backends cannot add."""
    if _sent_as_bytes(op.tensor) and isinstance(op, AllReduce | ReduceScatter | Reduce):
        raise ProgramError(
            f"{op} cannot be summed: float8 and bool are sent as bytes; decode them before the sum"
        )


def _sent_as_bytes(tensor: torch.Tensor) -> bool:
    return tensor.element_size() == 1 and tensor.dtype not in (torch.uint8, torch.int8)


def carrier(op: Collective) -> torch.Tensor:
    """Return the op's tensor in a dtype that every backend supports, sharing its memory."""
    if op.tensor.is_complex():
        return torch.view_as_real(op.tensor)
    return op.tensor.view(torch.uint8) if _sent_as_bytes(op.tensor) else op.tensor


def as_carrier(carrier: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return a view of the result tensor in the carrier's dtype."""
    if result.is_complex():
        return torch.view_as_real(result)
    return result.view(carrier.dtype)
