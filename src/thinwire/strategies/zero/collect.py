"""A program that collects all ranks' states on one rank, shard by shard and batch by batch.

The owner broadcasts a description of its shard first, with its values and its tensors' shapes, then the
tensors themselves. Ranks that do not keep the shard hold one batch at a time. Descriptions are loaded with
`weights_only=True`, so none can run code.
"""

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from thinwire.checkpoint.trees import copied
from thinwire.engine.ops import Broadcast, Collectives
from thinwire.engine.pack import pack, unpack
from thinwire.errors import StateError
from thinwire.strategies.zero.parameters import BATCH, batches

_CPU = torch.device("cpu")
_ERROR = "error"
_STATE = "state"


def collect(
    own: dict[Any, Any], rank: int, size: int, to: int | None, device: torch.device, limit: int = BATCH
) -> Collectives[list[dict[Any, Any]]]:
    """Return every rank's `own` by rank, copied to the CPU of rank `to`, and an empty list on the others.

    Args:
        own: This rank's state.
        rank: This rank.
        size: The number of ranks.
        to: The rank that collects. None for every rank.
        device: The device that tensors are sent from and received on.
        limit: The most bytes in one broadcast.

    Raises:
        StateError: A rank's state cannot be sent. All ranks raise.

    >>> from thinwire.engine.simulate import simulate
    >>> states = [{0: {"step": torch.tensor(float(rank)), "lr": 0.1}} for rank in range(2)]
    >>> cpu = torch.device("cpu")
    >>> simulate([[collect(own, rank, 2, to=1, device=cpu)] for rank, own in enumerate(states)]).results[1]
    [[{0: {'step': tensor(0.), 'lr': 0.1}}, {0: {'step': tensor(1.), 'lr': 0.1}}]]
    """
    collected: list[dict[Any, Any]] = []
    keeps = to is None or rank == to
    for owner in range(size):
        if owner == to:  # needs no collective
            state = copied(own, _to_cpu) if keeps else {}
        else:
            state = yield from _shard(own if rank == owner else {}, owner, rank, keeps, device, limit)
        if keeps:
            collected.append(state)
    return collected


def _shard(
    own: dict[Any, Any], owner: int, rank: int, keeps: bool, device: torch.device, limit: int
) -> Collectives[dict[Any, Any]]:
    """Broadcast one owner's description and tensors, and return its state if this rank keeps it."""
    text = _describe(own) if rank == owner else b""
    length = yield Broadcast(torch.tensor([len(text)], dtype=torch.int64, device=device), src=owner)
    words = torch.empty(int(length), dtype=torch.uint8, device=device)
    if rank == owner:
        words.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    words = yield Broadcast(words, src=owner)
    described = _understand(bytes(words.tolist()))
    if _ERROR in described:
        raise StateError(f"rank {owner} cannot send its state: {described[_ERROR]}")
    kinds, mine = list(_tensors(described[_STATE])), list(_tensors(own))
    arrived: dict[int, torch.Tensor] = {}
    for batch in batches(kinds, limit):
        shapes = [kinds[number].shape for number in batch]
        if rank == owner:
            flat = pack([mine[number].detach().to(device) for number in batch])
        else:
            numbers = sum(shape.numel() for shape in shapes)
            flat = torch.empty(numbers, dtype=kinds[batch[0]].dtype, device=device)
        flat = yield Broadcast(flat, src=owner)
        for number, sent in zip(batch, unpack(flat, shapes), strict=True) if keeps else ():
            arrived[number] = torch.empty_like(kinds[number], device=_CPU).copy_(sent)
    if not keeps:
        return {}
    ordered = iter([arrived[number] for number in range(len(kinds))])
    state: dict[Any, Any] = copied(described[_STATE], lambda _: next(ordered))
    return state


def _describe(state: dict[Any, Any]) -> bytes:
    """Return the state with meta tensors, or the reason why it cannot be sent, for all ranks to raise."""
    for tensor in _tensors(state):
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return _saved(
                {_ERROR: f"it has a {tensor.layout} {type(tensor).__name__}; only dense tensors can be sent"}
            )
    text = _saved({_STATE: copied(state, lambda tensor: torch.empty_like(tensor, device="meta"))})
    try:
        _understand(text)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        return _saved({_ERROR: f"only tensors and plain values are safe to load elsewhere ({reason})"})
    return text


def _saved(tree: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def _understand(text: bytes) -> dict[str, Any]:
    tree: dict[str, Any] = torch.load(io.BytesIO(text), weights_only=True)
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Return all tensors, in the order in which `copied` visits them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    copied(tree, note)
    return iter(found)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy even a CPU tensor, so that later steps do not change the collected state."""
    return tensor.detach().to(_CPU, copy=True)
