"""The handle of a replica among others that come and go."""

from collections.abc import Callable, Mapping
from typing import Any

from thinwire.checkpoint.validate import check_count
from thinwire.engine.meter import Meter, Stats, sent_text
from thinwire.errors import AttachError, StateError
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.live.averager import LiveAverager
from thinwire.strategies.live.replica import Replica


class LiveWire:
    """The handle that `thinwire.integrations.torchft.attach` returns.

    Args:
        replica: This replica's state.
        averager: Its exchanges.
        meter: The record of its exchanges.
        outside: Functions that return and load the state of the membership.
    """

    def __init__(
        self,
        replica: Replica,
        averager: LiveAverager,
        meter: Meter,
        outside: tuple[Callable[[], dict[str, int]], Callable[[dict[str, int]], None]],
    ) -> None:
        self._replica = replica
        self._averager = averager
        self._meter = meter
        self._outside = outside

    def __repr__(self) -> str:
        count = len(self.replicas)
        sent = sent_text(self.stats().bytes_sent, 0)
        replicas = f"{count} replica{'' if count == 1 else 's'}"
        return f"LiveWire({self.program!r}, {replicas}, step {self.step}, {sent})"

    @property
    def program(self) -> Averaging:
        """The configuration that runs."""
        return self._replica.config

    @property
    def step(self) -> int:
        """The job's number of training steps. A replica that joins continues at that of its peers."""
        return self._replica.step

    @property
    def exchanges(self) -> int:
        """The number of committed exchanges since the job began."""
        return self._replica.exchanges

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of the replicas in the last committed exchange."""
        return self._averager.replicas

    def join(self) -> None:
        """Wait for the other replicas' next exchange, and continue from their state.

        The first forward of the model does so too. Call it before to know `step` at once.

        Raises:
            WireError: There were not enough replicas in time.
            MismatchError: This replica is set up differently from the others.
        """
        self._averager.join()

    def finalize(self) -> None:
        """Set the models of all replicas to their exact mean; call it at the end, on every replica.

        It waits for replicas that are still training, as far as the lighthouse waits for them. Training may
        continue afterwards.

        Raises:
            WireError: There were not enough replicas in time.
        """
        self._averager.finalize()

    def stats(self) -> Stats:
        """Return bytes and times of the exchanges so far: totals, and the latest in full."""
        return self._meter.snapshot()

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's own state, with the manager's step.

        It has anchors, outer optimizer, residuals and parameters. Save it with the optimizer's state. Every
        replica has its own. A replica without a saved state needs
        none: it joins the others and receives theirs.
        """
        return {"replica": self._replica.state_dict(), "manager": dict(self._outside[0]())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; call it before the first forward, after the optimizer was loaded.

        Replicas whose states are older than the newest receive that one's when they join.

        Args:
            state: What `state_dict` returned.

        Raises:
            AttachError: This replica has joined the others already.
            StateError: The state does not fit. Nothing was changed.
        """
        if self._averager.joined:
            raise AttachError("load_state_dict was called after this replica had joined: call it before")
        if not isinstance(state, Mapping) or not {"replica", "manager"} <= set(state):
            raise StateError("the state was not saved by a wire of thinwire.integrations.torchft")
        manager = state["manager"]
        if not isinstance(manager, Mapping) or set(manager) != set(self._outside[0]()):
            raise StateError(f"the state's manager={manager!r} is not one of this version of torchft")
        for name, value in manager.items():
            check_count(name, value)
        self._replica.load_state_dict(state["replica"])
        self._outside[1](dict(manager))

    def __reduce__(self) -> str:
        raise AttachError(
            "a wire belongs to a running model and cannot be copied or pickled: save wire.state_dict()"
        )
