"""All ranks' state as one mapping on rank 0, for checkpoints that one rank writes.

Frameworks save rank 0's objects and load them on every rank. That loses the other ranks' residuals, and with
averaged models or `ZeRO` their optimizers too.

`collect` gathers states by broadcasts: each owner broadcasts a description of its state first, with its
values and its tensors' shapes, then the tensors, batch by batch. Ranks that do not keep the state drop each
batch. Sends from rank to rank would load the other links less, but saving is rare.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thinwire.checkpoint.attachment import SavableWire
from thinwire.checkpoint.optimizer_state import per_rank
from thinwire.checkpoint.rank_keys import by_rank, choose, rank_key
from thinwire.checkpoint.save import own_extra
from thinwire.checkpoint.trees import copied
from thinwire.checkpoint.wire_state import all_or_none
from thinwire.engine.comm.borrowed_group import run_blocking
from thinwire.engine.futures import at_work
from thinwire.engine.ops import Broadcast, Collectives
from thinwire.engine.pack import BATCH, batches, pack, unpack
from thinwire.errors import StateError, UnavailableError

FORMAT = 1
_KEYS = ("wire", "optimizers", "extra")


class GatheredState:
    """The state of a wire on all ranks, gathered to rank 0, to be saved with any framework's checkpoint.

    With averaged models and `ZeRO`, it contains each rank's optimizer state. Load it after the model and the
    optimizer, because it replaces the state that rank 0 saved by each rank's own. It loads on any number of
    ranks. Rank 0 holds all ranks' states in CPU memory while they are saved. To avoid that, use
    `save_checkpoint`.

    Args:
        wire: The wire that `attach` returned.
        everywhere: Whether every rank receives all states, instead of rank 0 only. It is meant for
            checkpoints that one rank of each node writes to a local disk.
        **extra: Further objects whose state differs from rank to rank, with state_dict and load_state_dict.
            With averaged models, a GradScaler is one.

    Example::

        state = thinwire.GatheredState(wire)
        saved = state.state_dict()  # on every rank
        if rank == 0:
            torch.save({"model": ddp.module.state_dict(), "thinwire": saved}, path)
        ...
        state.load_state_dict(torch.load(path)["thinwire"])  # on every rank
    """

    def __init__(self, wire: SavableWire, *, everywhere: bool = False, **extra: Any) -> None:
        shard = wire.attachment("GatheredState").model.shard_key
        if shard is not None:
            raise UnavailableError(
                f"GatheredState gathers whole states to one rank, and this rank holds {shard}: save with"
                " torch.distributed.checkpoint, and the wire with it, as dcp.save({..., 'wire': wire}, ...)"
            )
        self._wire = wire
        self._everywhere = everywhere
        self._extra = extra
        wire.await_optimizer_states()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks. Every rank must call it, between steps.

        Returns:
            A mapping of CPU tensors and plain values, safe for `torch.load(..., weights_only=True)`. On ranks
            other than 0 it holds that rank's state alone, unless `everywhere` was given.

        Raises:
            AttachError: Called during backward.
            StateError: A rank's state cannot be sent.
            WireError: A rank did not call it in time.
        """
        own: dict[str, Any] = {"wire": self._wire.state_dict()}  # first, as it ends an open step
        attached = self._wire.attachment("state_dict")
        model = attached.model
        if attached.optimizer_state_differs:
            own["optimizers"] = per_rank(attached.optimizers, model.group).state_dict()
        if self._extra:
            states = {name: held.state_dict() for name, held in self._extra.items()}
            own["extra"] = {rank_key(*attached.place): (states,)}
        to = None if self._everywhere else 0
        with at_work():
            program = collect(own, *attached.place, to, model.device)
            gathered = run_blocking(program, model.group) or [own]
        by_key = {key: {rank: state for each in gathered for rank, state in each[key].items()} for key in own}
        return {"format": FORMAT, **by_key}

    @torch.inference_mode(False)  # loaded tensors are updated in place later
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of all ranks; every rank must call it, before the first backward.

        Args:
            state: The result of `state_dict` on rank 0. Load the model and the optimizer first.

        Raises:
            StateError: The state does not fit. Other ranks raise MismatchError.
        """
        attached = self._wire.attachment("load_state_dict")
        place = attached.place
        with all_or_none(attached.communicator, "load_state_dict of all ranks") as agreed:
            states = _checked(state)
            for ranked in states.values():
                choose(ranked, *place)
            if self._extra and "extra" not in states:
                raise StateError(f"the state has no {', '.join(self._extra)}: it was saved without")
            extra = own_extra(states["extra"], self._extra, *place) if self._extra else {}
            agreed["keys"] = ", ".join(states)
        # The framework has loaded rank 0's optimizer on every rank. Each rank's own replaces it here.
        if "optimizers" in states:
            per_rank(attached.optimizers, attached.model.group).load_state_dict(states["optimizers"])
        self._wire.load_state_dict(states["wire"])
        for name, held in self._extra.items():
            held.load_state_dict(extra[name])


def _checked(state: object) -> dict[str, Any]:
    """Return the states by key; raise StateError unless they are those of all ranks of one job."""
    if not isinstance(state, Mapping) or "wire" not in state:
        raise StateError(
            f"a {type(state).__name__} without 'wire' is not a state of GatheredState: pass the"
            " result of its state_dict() on rank 0"
        )
    if state.get("format") != FORMAT:
        raise StateError(
            f"format {state.get('format')!r} is not {FORMAT}: the state was written by another version"
        )
    states = {key: state[key] for key in _KEYS if key in state}
    for key, ranked in states.items():
        size, found = by_rank(ranked)
        if len(found) != size:
            raise StateError(
                f"{key!r} has the states of {len(found)} of {size} ranks: save the result of state_dict() on"
                " rank 0, or pass everywhere=True if another rank saves it"
            )
    return states


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
    encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    if rank == owner:
        encoded.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    encoded = yield Broadcast(encoded, src=owner)
    described = _understand(bytes(encoded.tolist()))
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
    # An exception on the owner alone would leave the other ranks waiting for its broadcast. So the reason is
    # broadcast in place of the description, which is also tried here as the other ranks will read it.
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
    # weights_only: another rank's bytes must not run code here.
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
