"""The state that a newcomer receives from a live peer, and its validation."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thinwire.checkpoint.optimizer_state import load_local_state, local_state
from thinwire.checkpoint.trees import copied
from thinwire.checkpoint.validate import check_count, check_tensors
from thinwire.engine.comm.agreement import SetUp, differences_text, full_texts, texts_of
from thinwire.engine.pack import local_part
from thinwire.errors import MismatchError, StateError
from thinwire.monitors.replicas import fingerprints
from thinwire.programs.memory import Memory, Staged
from thinwire.step.transaction import Steps
from thinwire.strategies.averaging.anchors import restored
from thinwire.strategies.averaging.handshake import hashed
from thinwire.strategies.averaging.replica import Replica, no_autograd

logger = logging.getLogger("thinwire")

_COUNTS = ("step", "exchanges", "lineage", "exchange")
_DONATED = {*_COUNTS, "set_up", "set_up_hash", "settled", "outer", "buffers", "shared", "optimizers"}
SAME_SET_UP = "Give all replicas the same program, options, min_replicas, model and versions"
"""The advice where set-ups differ."""


@dataclass(frozen=True)
class Prepared:
    """An exchange that this replica completed and could not commit, while others may have."""

    exchange: int
    memory: Staged


class LiveState:
    """A live replica's history of exchanges, and its state as a newcomer receives it.

    Args:
        replica: This rank's part of the replica.
        steps: The counter of training steps.
        set_up: The values that must be equal on all replicas, as text by subject.
        share_optimizer: Whether newcomers receive the optimizers' state too.
    """

    def __init__(self, replica: Replica, steps: Steps, *, set_up: SetUp, share_optimizer: bool) -> None:
        self.replica = replica
        self.steps = steps
        self.lineage = 0
        """A hash of all exchanges that have led to the anchors."""
        self.last_exchange = 0
        """The number of the exchange that was committed last."""
        self.settled = False
        """Whether parameters are final: equal on all replicas that have ended their training."""
        self.prepared: Prepared | None = None
        self.started = False
        """Whether this replica has trained, or received or loaded a state."""
        self._set_up = set_up
        self._share_optimizer = share_optimizer

    @cached_property
    def set_up(self) -> dict[str, str]:
        """The values that must be equal on all replicas, as text by subject.

        The bits of frozen parameters are among them, since no exchange makes those equal. They are taken when
        the replica joins, because the model may be loaded after it was attached.
        """
        frozen = self.replica.frozen
        bits = fingerprints(map(local_part, frozen.values())).tolist() if frozen else None
        return texts_of({**self._set_up, "hash of frozen parameters": f"{hashed(bits)}"})

    @cached_property
    def set_up_hash(self) -> int:
        """A hash of all that must be equal on all replicas, including the order of parameters."""
        return hashed(list(full_texts(self._set_up).items()), self.set_up["hash of frozen parameters"])

    @property
    def step(self) -> int:
        """Training steps of the job, as this replica counts them."""
        return self.steps.count

    def fingerprint(self) -> int:
        """Return a hash of the anchors' bits."""
        anchors = self.replica.take_anchors()
        return hashed(fingerprints(anchors[name] for name in self.replica.parameters).tolist())

    def committed(self, exchange: int) -> None:
        """Append a committed exchange to the lineage."""
        self.lineage, self.last_exchange = hashed(self.lineage, exchange), exchange

    def donate(self) -> dict[str, Any]:
        """Return copies of what a newcomer needs: all that is equal on the replicas, and no residuals."""
        replica = self.replica
        sends_optimizer = self._share_optimizer and replica.config.optimizer_state != "reset"
        return {
            "step": self.step,
            "exchanges": replica.exchanges,
            "lineage": self.lineage,
            "exchange": self.last_exchange,
            "set_up": self.set_up,
            "set_up_hash": self.set_up_hash,
            "settled": self.settled,
            "outer": replica.take_anchors().state_dict(),
            "buffers": copied(replica.buffers),
            "shared": replica.memory.shared().state_dict(),
            "optimizers": list(map(local_state, replica.optimizers)) if sends_optimizer else None,
        }

    def receive(self, state: Mapping[str, Any]) -> None:
        """Take over a live peer's state. Residuals of this replica are kept, if it has any.

        Raises:
            MismatchError: The peer is set up differently.
            StateError: The peer's state does not fit.
        """
        self._check_fit(state)
        lost, trained = self.replica.window, self.started
        if self.prepared is not None and self.prepared.exchange == state["exchange"]:
            # The peer committed the exchange that this replica completed but could not commit, because the
            # last acknowledgement was lost. What it sent has arrived there. With its old residual it would
            # send a part of that again.
            self.prepared.memory.commit()
        self._take(state)
        if state["optimizers"] is not None and not trained:
            self._load_optimizers(state["optimizers"])
        self.started = True
        if trained:
            logger.warning(
                "this replica had fallen behind, and continues at step %d with a live peer's anchors: its own"
                " last %d steps are lost. Its residuals and the state of its optimizer are kept",
                self.step,
                lost,
            )

    def _check_fit(self, state: Mapping[str, Any]) -> None:
        """Raise MismatchError or StateError if this replica cannot continue from a peer's state."""
        if not isinstance(state, Mapping) or _DONATED - set(state):
            raise StateError("the peer's state is not one of thinwire: run the same version on all replicas")
        if state["set_up_hash"] == self.set_up_hash:
            return
        theirs = state["set_up"]
        if not isinstance(theirs, Mapping) or not all(isinstance(text, str) for text in theirs.values()):
            raise StateError("the peer's state does not describe its set-up: run the same version on all")
        own_or_peers = ("this replica", "the peer")
        differences = differences_text(
            [self.set_up, theirs], lambda places: " and ".join(own_or_peers[place] for place in places)
        )
        raise MismatchError(
            f"this replica is set up differently from the one that it would continue from: {differences}."
            f" {SAME_SET_UP}"
        )

    def _load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        try:
            for optimizer, saved in zip(self.replica.optimizers, states, strict=True):
                load_local_state(optimizer, saved)
        except Exception as error:  # any, from the user's own optimizer
            raise StateError(
                f"the peer's optimizers do not fit ({type(error).__name__}: {error}): pass the same ones on"
                " all replicas, or attach with share_optimizer=False"
            ) from error

    def _take(self, state: Mapping[str, Any]) -> None:
        """Take over a peer's state, and start a new window from its anchors."""
        replica = self.replica
        for key in _COUNTS:
            check_count(key, state[key])
        saved, buffers = state["buffers"], replica.buffers
        check_tensors("buffer", saved, buffers, finite=False)  # masks hold -inf
        shared = Memory()
        shared.load_state_dict(
            state["shared"], {name: held.shape for name, held in replica.parameters.items()}
        )
        anchors = restored(replica.new_anchors, state["outer"])
        # All is valid. From here on nothing raises, so a state is taken over as a whole or not at all.
        self.steps.restore(state["step"])
        self.lineage, self.last_exchange = state["lineage"], state["exchange"]
        self.settled, self.prepared = state["settled"], None
        replica.anchors, replica.exchanges, replica.window = anchors, state["exchanges"], 0
        replica.memory.take_shared(shared)
        with no_autograd():
            replica.write({name: anchors[name] for name in replica.parameters})
            for name, buffer in buffers.items():
                buffer.copy_(saved[name])
