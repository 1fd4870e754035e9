"""All ranks' states come to one rank, as a program: shard after shard, batch after batch.

A shard is described first (its values, and its tensors' shapes), then its tensors travel as what they are.
Ranks that only pass it on hold one batch at a time; nothing is unpickled that could run code.
"""

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from thinwire.errors import StateError
from thinwire.sharding.parameters import BATCH, batches
from thinwire.sharding.state import copied
from thinwire.wire.ops import Broadcast, Steps
from thinwire.wire.pack import pack, unpack

_CPU = torch.device("cpu")
_REFUSED = "refused"
_STATE = "state"


def collect(
    own: dict[Any, Any], rank: int, size: int, to: int, device: torch.device, limit: int = BATCH
) -> Steps[list[dict[Any, Any]]]:
    """Every rank's `own` by rank, copied to the CPU of rank `to`; elsewhere an empty list.

    >>> from thinwire.wire.simulate import simulate
    >>> states = [{0: {"step": torch.tensor(float(rank)), "lr": 0.1}} for rank in range(2)]
    >>> cpu = torch.device("cpu")
    >>> simulate([[collect(own, rank, 2, to=1, device=cpu)] for rank, own in enumerate(states)]).results[1]
    [[{0: {'step': tensor(0.), 'lr': 0.1}}, {0: {'step': tensor(1.), 'lr': 0.1}}]]
    """
    collected: list[dict[Any, Any]] = []
    for owner in range(size):
        if owner == to:  # it is there already
            state = copied(own, _to_cpu) if rank == to else {}
        else:
            state = yield from _shard(own if rank == owner else {}, owner, rank, to, device, limit)
        if rank == to:
            collected.append(state)
    return collected


def _shard(
    own: dict[Any, Any], owner: int, rank: int, to: int, device: torch.device, limit: int
) -> Steps[dict[Any, Any]]:
    """One owner's state, from its description and then its tensors."""
    text = _describe(own) if rank == owner else b""
    length = yield Broadcast(torch.tensor([len(text)], device=device), src=owner)
    words = torch.empty(int(length), dtype=torch.uint8, device=device)
    if rank == owner:
        words.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    words = yield Broadcast(words, src=owner)
    described = _understand(bytes(words.tolist()))
    if _REFUSED in described:
        raise StateError(f"rank {owner} cannot send its optimizer's state: {described[_REFUSED]}")
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
        for number, sent in zip(batch, unpack(flat, shapes), strict=True) if rank == to else ():
            arrived[number] = torch.empty_like(kinds[number], device=_CPU).copy_(sent)
    if rank != to:
        return {}
    ordered = iter([arrived[number] for number in range(len(kinds))])
    state: dict[Any, Any] = copied(described[_STATE], lambda _: next(ordered))
    return state


def _describe(state: dict[Any, Any]) -> bytes:
    """The state with tensors that have no content; or, for all ranks to read, why that cannot be."""
    for tensor in _tensors(state):
        if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return _saved(
                {_REFUSED: f"it has a {tensor.layout} {type(tensor).__name__}; only dense tensors travel"}
            )
    text = _saved({_STATE: copied(state, lambda tensor: torch.empty_like(tensor, device="meta"))})
    try:
        _understand(text)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        return _saved({_REFUSED: f"only tensors and plain values are safe to load elsewhere ({reason})"})
    return text


def _saved(tree: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def _understand(text: bytes) -> dict[str, Any]:
    tree: dict[str, Any] = torch.load(io.BytesIO(text), weights_only=True)
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors, in the order in which `copied` meets them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    copied(tree, note)
    return iter(found)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its own even where it is on the CPU already: the collected state is of one moment."""
    return tensor.detach().to(_CPU, copy=True)
