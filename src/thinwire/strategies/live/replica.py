"""The state of one replica, and the part of it that a newcomer receives."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.checkpoint.optimizer_state import load_local_state, local_state
from thinwire.checkpoint.trees import copied
from thinwire.checkpoint.validate import check_count, check_tensors
from thinwire.engine.comm.agreement import SetUp, differences_text, full_texts, texts_of
from thinwire.engine.pack import local_part
from thinwire.errors import AttachError, MismatchError, StateError
from thinwire.monitors.replicas import fingerprints
from thinwire.programs.memory import Memory, Staged
from thinwire.programs.parameter_names import original_name
from thinwire.strategies.averaging.anchors import Anchors, restored, split_evenly
from thinwire.strategies.averaging.local_parts import no_autograd
from thinwire.strategies.averaging.policy import Averaging, OuterLoop
from thinwire.strategies.live.handshake import hashed

logger = logging.getLogger("thinwire")

_COUNTS = ("step", "exchanges", "lineage")
_DONATED = {
    *_COUNTS,
    "set_up",
    "set_up_hash",
    "exchange",
    "settled",
    "outer",
    "buffers",
    "shared",
    "optimizers",
}
SAME_SET_UP = "Give all replicas the same program, options, min_replicas, model and versions"
"""The advice where set-ups differ."""


@dataclass(frozen=True)
class Prepared:
    """An exchange that this replica completed and could not commit, while others may have."""

    exchange: int
    memory: Staged


class Replica:
    """One replica's model with its anchors, outer optimizer, memory and counts.

    Args:
        module: The model: whole in this process, or sharded by FSDP2 over the ranks of the replica.
        optimizers: The optimizers that step it.
        config: What is exchanged, and when.
        set_up: The values that must be equal on all replicas, as text by subject.
        share_optimizer: Whether newcomers receive the optimizers' state too.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        config: Averaging,
        *,
        set_up: SetUp,
        share_optimizer: bool,
    ) -> None:
        self.trained = {
            original_name(name): one for name, one in module.named_parameters() if one.requires_grad
        }
        """The trained parameters by name, as optimizers hold them."""
        self._frozen = {
            original_name(name): one for name, one in module.named_parameters() if not one.requires_grad
        }
        self.buffers = {original_name(name): one for name, one in module.named_buffers()}
        self.optimizers = list(optimizers)
        self.config, self._set_up = config, set_up
        sizes = {name: one.numel() for name, one in self.parameters.items()}
        self.fragments = split_evenly(sizes, self.loop.fragments)
        self.memory = Memory()
        self.step = self.window = self.exchanges = self.lineage = 0
        self.last_exchange = 0
        """The number of the exchange that was committed last."""
        self.settled = False
        """Whether parameters are final: equal on all replicas that have ended their training."""
        self.prepared: Prepared | None = None
        self._anchors: Anchors | None = None
        self._share_optimizer = share_optimizer
        self._fresh = True

    @cached_property
    def set_up(self) -> dict[str, str]:
        """The values that must be equal on all replicas, as text by subject.

        The bits of frozen parameters are among them, since no exchange makes those equal. They are taken when
        the replica joins: the model may be loaded after it was attached.
        """
        bits = fingerprints(map(local_part, self._frozen.values())).tolist() if self._frozen else None
        return texts_of({**self._set_up, "hash of frozen parameters": f"{hashed(bits)}"})

    @cached_property
    def set_up_hash(self) -> int:
        """A hash of all that must be equal on all replicas, the order of parameters too."""
        return hashed(list(full_texts(self._set_up).items()), self.set_up["hash of frozen parameters"])

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's part of each trained parameter by name, sharing its memory."""
        return {name: local_part(one) for name, one in self.trained.items()}

    @property
    def loop(self) -> OuterLoop:
        """The outer optimizer's options."""
        loop = self.config.outer_loop
        assert loop is not None, "validated in attach"
        return loop

    @property
    def anchors(self) -> Anchors:
        """The anchors. They are taken from the parameters when first asked for."""
        if self._anchors is None:
            self._anchors = Anchors(self.parameters, self.fragments, self.loop.optimizer)
        return self._anchors

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.parameters.values())).device

    def fingerprint(self) -> int:
        """Return a hash of the anchors' bits."""
        return hashed(fingerprints(self.anchors[name] for name in self.parameters).tolist())

    def count_step(self) -> None:
        """Count a training step.

        Raises:
            AttachError: A parameter was unfrozen, and no exchange would include it.
        """
        for name, one in self._frozen.items():
            if one.requires_grad:
                raise AttachError(
                    f"parameter {name!r} was frozen when the wire was attached, so it is not averaged, and"
                    " now it trains: restart all replicas, and unfreeze it before attach"
                )
        self.step += 1
        self.window += 1
        self.settled, self._fresh = False, False

    def return_to_anchors(self, names: Sequence[str] | None = None) -> None:
        """Set parameters to their anchors, in place."""
        with no_autograd():
            parameters = self.parameters
            for name in parameters if names is None else names:
                parameters[name].copy_(self.anchors[name])

    def residual_names(self) -> list[str]:
        """Return the parameters that have a residual."""
        return [name for name in self.parameters if self.memory.residuals_of(name)]

    def donate(self) -> dict[str, Any]:
        """Return copies of what a newcomer needs: all that is equal on the replicas, and no residuals."""
        sends_optimizer = self._share_optimizer and self.config.optimizer_state != "reset"
        return {
            **{key: getattr(self, key) for key in _COUNTS},
            "set_up": self.set_up,
            "set_up_hash": self.set_up_hash,
            "exchange": self.last_exchange,
            "settled": self.settled,
            "outer": self.anchors.state_dict(),
            "buffers": copied(self.buffers),
            "shared": self.memory.shared().state_dict(),
            "optimizers": list(map(local_state, self.optimizers)) if sends_optimizer else None,
        }

    def receive(self, state: Mapping[str, Any]) -> None:
        """Take over a live peer's state. Residuals of this replica are kept, if it has any.

        Raises:
            MismatchError: The peer is set up differently.
            StateError: The peer's state does not fit.
        """
        self._check_fit(state)
        lost, trained = self.window, not self._fresh
        if self.prepared is not None and self.prepared.exchange == state["exchange"]:
            # The peer committed the exchange that this replica could not: what it sent there has arrived.
            self.prepared.memory.commit()
        self._take(state)
        self.settled = state["settled"]
        if state["optimizers"] is not None and not trained:
            self._load_optimizers(state["optimizers"])
        self._fresh = False
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
            raise StateError(
                "the state of a peer is not one of thinwire: run the same version on all replicas"
            )
        if state["set_up_hash"] == self.set_up_hash:
            return
        theirs = state["set_up"]
        if not isinstance(theirs, Mapping) or not all(isinstance(one, str) for one in theirs.values()):
            raise StateError("the state of a peer does not describe its set-up: run the same version on all")
        own_or_peers = ("this replica", "the peer")
        differences = differences_text(
            [self.set_up, theirs], lambda places: " and ".join(own_or_peers[place] for place in places)
        )
        raise MismatchError(
            f"this replica is set up differently from the one that it would continue from: {differences}."
            f" {SAME_SET_UP}"
        )

    def _load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load a peer's optimizers."""
        try:
            for one, saved in zip(self.optimizers, states, strict=True):
                load_local_state(one, saved)
        except Exception as error:  # any, from the user's own optimizer
            raise StateError(
                f"the optimizers of a peer do not fit ({type(error).__name__}: {error}): give all replicas"
                " the same ones, or attach with share_optimizer=False"
            ) from error

    def _take(self, state: Mapping[str, Any]) -> None:
        """Take over the part of a state that is equal on all replicas, and start a new window."""
        for key in (*_COUNTS, "exchange"):
            check_count(key, state[key])
        buffers = state["buffers"]
        check_tensors("buffer", buffers, self.buffers, finite=False)  # masks hold -inf
        shared = Memory()
        shared.load_state_dict(state["shared"], {name: one.shape for name, one in self.parameters.items()})
        self._anchors = restored(self._new_anchors, state["outer"])
        for key in _COUNTS:
            setattr(self, key, state[key])
        self.last_exchange, self.window, self.prepared = state["exchange"], 0, None
        self.memory.take_shared(shared)
        self.return_to_anchors()
        with no_autograd():
            for name, buffer in self.buffers.items():
                buffer.copy_(buffers[name])

    def _new_anchors(self) -> Anchors:
        return Anchors(self.parameters, self.fragments, self.loop.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's own state, with its residuals and parameters."""
        return {
            **{key: getattr(self, key) for key in _COUNTS},
            "exchange": self.last_exchange,
            "window": self.window,
            "outer": self.anchors.state_dict(),
            "parameters": copied(self.parameters),
            "buffers": copied(self.buffers),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            AttachError: This replica has taken steps already.
            StateError: The state does not fit. Nothing was changed.
        """
        if not self._fresh:
            raise AttachError("load_state_dict was called after the first step: call it before training")
        keys = {*_COUNTS, "exchange", "window", "outer", "parameters", "buffers", "memory"}
        if not isinstance(state, Mapping) or keys - set(state):
            raise StateError("the state was not saved by a wire of thinwire.integrations.torchft")
        check_count("window", state["window"])
        check_tensors("parameter", state["parameters"], self.parameters)
        memory = Memory()
        memory.load_state_dict(state["memory"], {name: one.shape for name, one in self.parameters.items()})
        self._take({**state, "shared": memory.shared().state_dict()})
        self.memory.take_over(memory)
        self.window, self._fresh = state["window"], False
        with no_autograd():
            for name, one in self.parameters.items():
                one.copy_(state["parameters"][name])
