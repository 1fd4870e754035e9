"""The exact mean of sparse gradients, as of `nn.Embedding(sparse=True)`."""

from typing import Any

import torch

from thinwire.engine.ops import AllGather, Collectives
from thinwire.errors import UnavailableError
from thinwire.programs.description import short
from thinwire.programs.program import Bucket, Outcome, Program


def require_sparse(program: Program, bucket: Bucket) -> None:
    """Raise UnavailableError if a bucket is sparse and the program cannot average it."""
    if not program.takes_sparse:
        raise UnavailableError(
            f"the gradient of {bucket.names[0]} is sparse, and {short(program)} averages dense ones: make its"
            " module with sparse=False, or register allreduce_hook"
        )


def sparse_mean(bucket: Bucket) -> Collectives[Outcome]:
    """Average a sparse gradient exactly, with the numbers of torch's all-reduce on Gloo.

    Each rank has gradients of other rows, and of another number of rows. So ranks gather these numbers first,
    and then rows that are padded to the largest of them.
    """
    # GPUs multiply by 1/W here, and add up repeated rows in any order, so last bits differ from a CPU's.
    # Ranks agree all the same, because each of them adds up the same gathered numbers.
    own = bucket.buffer.div(bucket.world_size).coalesce()
    indices, values = own.indices(), own.values()
    counts = yield AllGather(indices.new_tensor([indices.shape[1]]))
    # The only read of values by the host in a program: collectives need the number of rows beforehand.
    held: list[int] = counts.flatten().tolist()
    all_indices = yield AllGather(_padded(indices.T, max(held)))
    all_values = yield AllGather(_padded(values, max(held)))
    # Add up in the order of ranks, which makes the sum the same on all of them.
    total: Any = None
    for places, numbers, count in zip(all_indices, all_values, held, strict=True):
        part = torch.sparse_coo_tensor(places[:count].T, numbers[:count], own.shape, check_invariants=True)
        total = part if total is None else total.add_(part)
    mean = total.coalesce()
    error = torch.zeros_like(mean) if bucket.track_error else None
    return Outcome(mean, error)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows followed by zeros, `count` in all."""
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded
