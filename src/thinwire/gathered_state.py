"""All ranks' state as one mapping on rank 0, for checkpoints that one rank writes.

Frameworks save rank 0's objects and load them on every rank. That loses the other ranks' residuals, and with
averaged models or `ZeRO` their optimizers too.
"""

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.checkpoint.optimizers import per_rank
from thinwire.checkpoint.rank_keys import by_rank, choose, rank_key
from thinwire.checkpoint.wire_state import all_or_none
from thinwire.engine.blocking import run_blocking
from thinwire.engine.futures import at_work
from thinwire.errors import StateError, UnavailableError
from thinwire.saving import own_extra
from thinwire.strategies.zero.collect import collect
from thinwire.wire import Wire

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

    def __init__(self, wire: Wire, *, everywhere: bool = False, **extra: Any) -> None:
        shard = wire._runner.context.model.shard_key
        if shard is not None:
            raise UnavailableError(
                f"GatheredState gathers whole states to one rank, and this rank holds {shard}: save with"
                " torch.distributed.checkpoint, and the wire with it, as dcp.save({..., 'wire': wire}, ...)"
            )
        self._wire = wire
        self._everywhere = everywhere
        self._extra = extra
        wire._runner.strategy.awaits_optimizers = True

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
        runner = self._wire._runner
        communicator, model = runner.communicator, runner.context.model
        own: dict[str, Any] = {"wire": self._wire.state_dict()}  # first, as it ends an open step
        if runner.config.optimizer_state_differs:
            own["optimizers"] = per_rank(runner.context.optimizers(), model.group).state_dict()
        if self._extra:
            states = {name: held.state_dict() for name, held in self._extra.items()}
            own["extra"] = {rank_key(communicator.rank, communicator.size): (states,)}
        to = None if self._everywhere else 0
        with at_work():
            program = collect(own, communicator.rank, communicator.size, to, model.device)
            gathered = run_blocking(program, model.group) or [own]
        by_key = {key: {rank: one for each in gathered for rank, one in each[key].items()} for key in own}
        return {"format": FORMAT, **by_key}

    @torch.inference_mode(False)  # loaded tensors are updated in place later
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of all ranks; every rank must call it, before the first backward.

        Args:
            state: The result of `state_dict` on rank 0. Load the model and the optimizer first.

        Raises:
            StateError: The state does not fit. Other ranks raise MismatchError.
        """
        runner = self._wire._runner
        runner.between_steps("load_state_dict")
        communicator, group = runner.communicator, runner.context.model.group
        place = communicator.rank, communicator.size
        with all_or_none(communicator, "load_state_dict of all ranks") as agreed:
            states = _checked(state)
            for one in states.values():
                choose(one, *place)
            if self._extra and "extra" not in states:
                raise StateError(f"the state has no {', '.join(self._extra)}: it was saved without")
            extra = own_extra(states["extra"], self._extra, *place) if self._extra else {}
            agreed["keys"] = ", ".join(states)
        if "optimizers" in states:
            per_rank(runner.context.optimizers(), group).load_state_dict(states["optimizers"])
        self._wire.load_state_dict(states["wire"])
        self._wire._runner.strategy.awaits_optimizers = True  # loading may have changed the strategy
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
    for key, one in states.items():
        size, found = by_rank(one)
        if len(found) != size:
            raise StateError(
                f"{key!r} has the states of {len(found)} of {size} ranks: save the result of state_dict() on"
                " rank 0, or pass everywhere=True if another rank saves it"
            )
    return states
