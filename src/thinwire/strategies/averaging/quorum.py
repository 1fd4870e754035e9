"""Live replicas, which join and leave while a job runs: a membership on a quorum service.

One round, on every replica that the service lets take part:

    begin        the service agrees on the replicas, connects them, and hands a newcomer a peer's state
    handshake    set-ups, lineages and steps are compared; all replicas decide alike
    exchange     means of what is due at the job's step; newcomers contribute zeros
    acknowledge  all replicas have received everything
    vote         the service commits the round, or the replica discards it

Nothing of a round is applied before the vote. A failed round is discarded: anchors, residuals and counts stay
as before, training continues from the local parameters, and the next round covers both windows. The round has
an engine and a communicator of its own, because an engine that failed once is down for good.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from thinwire.checkpoint.validate import check_count
from thinwire.engine.comm.agreement import differences_text
from thinwire.engine.engine import Engine
from thinwire.engine.futures import at_work
from thinwire.engine.meter import MODELS, Meter
from thinwire.engine.ops import Collectives
from thinwire.errors import (
    AttachError,
    DivergedError,
    MismatchError,
    StateError,
    ThinwireError,
    UnavailableError,
    WireError,
)
from thinwire.programs.allreduce import Exact
from thinwire.programs.finite import all_finite
from thinwire.programs.memory import MODEL_SCOPE, Memory, Staged
from thinwire.strategies.averaging.exchange import (
    Contribution,
    ExchangeId,
    Members,
    ModelExchange,
    check_finite,
)
from thinwire.strategies.averaging.handover import SAME_SET_UP, LiveState, Prepared
from thinwire.strategies.averaging.handshake import (
    Decision,
    OneRank,
    ReplicaRanks,
    Row,
    agree,
    decide,
    decoded,
    gather_rows,
)
from thinwire.strategies.averaging.membership import Contribute, InFlight
from thinwire.strategies.averaging.policy import Average
from thinwire.strategies.averaging.quorum_service import QuorumCommunicator, QuorumService
from thinwire.strategies.averaging.replica import no_autograd
from thinwire.strategies.averaging.shared_state import share_buffers

logger = logging.getLogger("thinwire")

_KEY = "live"
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two attempts. They double, since torchft logs each attempt of a replica that is alone."""
_LEAST = 5.0
"""The minimum number of seconds for an attempt, where fewer are left of the time limit."""
_REPEATED = 60.0
"""Seconds between two logs of the same reason why a replica has not joined."""
_SHOWN = 5


@dataclass(eq=False)
class Work:
    """The results of a round, applied if it is committed.

    Attributes:
        decision: The decision of the handshake.
        set_ups: The set-ups of all replicas by rank, if they differ and could be gathered.
        flights: The averages of the fragments that were exchanged; all of them at the end of the training.
        memory: The programs' memory after the exchange.
        without_residuals: The memory that `memory` commits to, if this replica contributed nothing.
    """

    decision: Decision
    set_ups: tuple[Mapping[str, str], ...] = ()
    flights: list[InFlight] = field(default_factory=list)
    memory: Staged = field(default_factory=lambda: Memory().staged())
    without_residuals: Memory | None = None


class LiveReplicas:
    """A membership of replicas that join and leave. Every method that exchanges waits for the others.

    Args:
        service: The service that agrees on the replicas of each round.
        state: This rank's replica, with its history of exchanges.
        contribute: Returns this replica's contribution of a fragment.
        meter: The record of exchanges.
        check_every: Committed exchanges between two comparisons of the anchors' bits. 0: never.
        ranks: The ranks of this replica.
    """

    neighbours = ()
    to_unfreeze = "restart all replicas, and unfreeze it before attach"

    def __init__(
        self,
        service: QuorumService,
        state: LiveState,
        contribute: Contribute,
        *,
        meter: Meter,
        check_every: int = 0,
        ranks: ReplicaRanks | None = None,
    ) -> None:
        self.joined = False
        self.replicas: tuple[str, ...] = ()
        self.service = service
        self.state = state
        self._replica = state.replica
        self._contribute = contribute
        self._meter = meter
        self._check_every = check_every
        self._ranks = ranks or OneRank()
        self._logged: tuple[str, float] = ("", 0.0)

    def check(self) -> None:
        """Raise AttachError if the optimizer has stepped before this replica joined."""
        if not self.joined:
            raise AttachError(
                "the optimizer has stepped before this replica joined the others: call the attached model,"
                " model(...), whose forward joins them, or wire.join()"
            )
        # Called at the end of a training step: from here on the parameters are not final.
        self.state.settled, self.state.started = False, True

    def join(self) -> Iterator[InFlight]:
        """Wait for the other replicas' next round, and continue from their state. Later calls do nothing.

        A newcomer could also train a window first and join with its first exchange, but those steps would be
        thrown away.
        """
        return self._join(self._deadline())

    def _join(self, deadline: float) -> Iterator[InFlight]:
        pause = _PAUSE
        while not self.joined:
            work = self._round(deadline)
            if work is None:
                pause = self._pause(deadline, pause)
            else:
                yield from work.flights

    def exchange(self, averages: Sequence[Average], step: int) -> list[InFlight]:
        """Run a round, and return its averages, to be applied now. Empty if it was discarded.

        What is averaged follows from the largest step of all replicas, not from this one's `averages`: a
        replica that is behind takes part in what the others exchange.
        """
        work = self._round(self._deadline())
        return [] if work is None else work.flights

    def applied(self, flight: InFlight) -> None:
        """Copy the buffers that were exchanged before the vote."""
        buffers = self._replica.buffers
        for name, buffer in flight.buffers.items():
            buffers[name].copy_(buffer)

    def synchronise(self, memory: Memory) -> Iterator[InFlight]:
        """Set all models to their exact mean, with the replicas that have ended their training too.

        Replicas reach the end at different times. Rounds go on as long as one of them still trains, and this
        replica contributes nothing new to them. The round in which all are final averages exactly. One more
        round without content tells a replica that it may leave: until then it may be the only one from which
        another can receive the final state.

        Raises:
            WireError: There were not enough replicas in time.
        """
        deadline = self._deadline()
        yield from self._join(deadline)
        pause = _PAUSE
        while True:
            work = None
            try:
                work = self._round(deadline, final=True)
            except WireError:
                if not self.state.settled:
                    raise
                logger.info("the other replicas have left, with the same model as this one")
            if work is None and self.state.settled:
                return
            if work is not None and work.decision.final and not work.decision.contributors:
                return
            if work is None:
                pause = self._pause(deadline, pause)
            else:
                yield from work.flights
                deadline, pause = self._deadline(), _PAUSE  # others are still training

    def retire(self, trained_locally: bool) -> None:
        """Raise UnavailableError: the other replicas would not stop averaging too."""
        raise UnavailableError("live replicas cannot swap programs: restart all of them with the other one")

    def close(self) -> None:
        """Do nothing: the service belongs to the caller."""

    # Rounds

    def _round(self, deadline: float, *, final: bool = False) -> Work | None:
        """Run one round; return its results if it was committed, else None.

        Args:
            deadline: The time at which to stop waiting for other replicas.
            final: Whether this replica has ended its training.
        """
        service, state = self.service, self.state
        self._replica.take_anchors()  # before a peer may ask for them
        with at_work(), no_autograd():
            try:
                service.begin(timedelta(seconds=max(_LEAST, deadline - time.monotonic())))
            except BaseException:
                service.abort()  # the others may be connected already, and would wait for this replica
                raise
            state.prepared = None  # `begin` has decided by now whether its exchange was committed
            work, error = self._attempt(final)
            if not service.vote(error):
                self._discard(work, error)
                return None
            assert work is not None, "a vote without an error"
            self._commit(work)
            self._log_members(work.decision.names)
        self.joined = True
        return work

    def _attempt(self, final: bool) -> tuple[Work | None, ThinwireError | None]:
        """Exchange among the replicas in the current quorum; return the results, or the failure."""
        communicator = QuorumCommunicator(self.service)
        try:
            row = self._row(final)
        except BaseException:
            communicator.abort()  # a rank of this replica is lost, and the others go on without all of it
            raise
        work: Work | None = None
        error: ThinwireError | None = None
        if row is None:
            reason = self.service.error or "another of its ranks is not connected"
            error = WireError(f"this replica could not connect to the others: {reason}")
            communicator.abort()
        else:
            work, error = self._exchange(row, communicator)
        communicator.release()
        return work, error

    def _row(self, final: bool) -> Row | None:
        """Return this replica's row of the handshake, or None if a rank is not connected. Collective."""
        replica, state, every = self._replica, self.state, self._check_every
        row = Row(
            set_up=state.set_up_hash,
            lineage=state.lineage,
            position=self.service.position,
            step=state.step,
            window=replica.window,
            final=final,
            name=self.service.name,
        )
        # Before the first exchange there is no lineage, but replicas must start from the same parameters.
        compare = not replica.exchanges or (every and replica.exchanges % every == 0)
        fingerprint = state.fingerprint() if compare else 0
        return agree(self._ranks, row, connected=self.service.error is None, fingerprint=fingerprint)

    def _exchange(
        self, row: Row, communicator: QuorumCommunicator
    ) -> tuple[Work | None, ThinwireError | None]:
        device = self._replica.device
        engine = Engine(communicator, device=device, meter=self._meter, purpose=MODELS)
        work: Work | None = None
        error: ThinwireError | None = None
        try:
            rows = self._run(engine, gather_rows(row.encoded(device)), "the handshake")
            work = Work(decide([decoded(numbers) for numbers in rows.cpu()]))
            if work.decision.different:
                with contextlib.suppress(WireError, ValueError):  # another version may not send it
                    work.set_ups = self._set_ups(engine)
            if work.decision.blocked:
                error = self._blocked(work)
            else:
                self._average(engine, work)
                # The service commits on each replica by itself. Without this acknowledgement, a replica that
                # dies while it sends its last bytes would leave one peer with all means and another without,
                # and the second would lose its window. Now that takes the loss of the acknowledgement.
                received = torch.ones(1, dtype=torch.int32, device=device)
                self._run(engine, gather_rows(received), "the acknowledgement")
        except WireError as failure:
            communicator.abort()  # now: the engine's own thread for it may come after `release`
            error = failure
        except BaseException as failure:
            communicator.abort()  # the others fail at once, and go on without this replica
            if isinstance(failure, Exception):
                self.service.vote(failure)
            raise
        finally:
            engine.close()
        return work, error

    def _set_ups(self, engine: Engine) -> tuple[Mapping[str, str], ...]:
        """Return the set-ups of all replicas, by rank."""
        device = self._replica.device
        text = json.dumps(self.state.set_up).encode()
        length = torch.tensor([len(text)], dtype=torch.int64, device=device)
        sizes = self._run(engine, gather_rows(length), "the sizes of set-ups")
        padded = bytearray(text.ljust(int(sizes.max()), b" "))
        padded_row = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        rows = self._run(engine, gather_rows(padded_row), "set-ups")
        return tuple(json.loads(bytes(row.tolist())) for row in rows.cpu())

    def _average(self, engine: Engine, work: Work) -> None:
        """Average what is due at the step of the job, if anything."""
        replica, decision, size = self._replica, work.decision, self.service.size
        every = range(len(replica.fragments))
        averages = replica.config.due(decision.step)
        due = every if decision.final else sorted({average.fragment for average in averages})
        if not decision.contributors or not due:
            return
        if replica.window or decision.final:
            work.memory = replica.memory.staged()
        else:
            # This replica holds the anchors and sends zeros. Its residuals stay for the exchange in which it
            # contributes again.
            work.without_residuals = replica.memory.shared()
            work.memory = work.without_residuals.scoped(MODEL_SCOPE).staged()
        members = Members(tuple(range(size)), self.service.rank, size)
        for fragment in due:
            contribution = self._contribute(fragment, work.memory)
            if decision.final:
                contribution = Contribution(contribution.tensors, Exact(), Memory())
            self._check_own(contribution)
            point = ExchangeId(decision.step, None if decision.final else fragment)
            means = ModelExchange(engine, point, contribution, members).means()
            # Newcomers contribute zeros. Rescale the mean to the contributors, so that they do not dilute it.
            share = size / decision.contributors
            means = means if share == 1 else {name: mean * share for name, mean in means.items()}
            check_finite(means, decision.step)
            work.flights.append(InFlight(fragment, 0, partial(dict, means), decision.contributors))
        if due[-1] == every[-1]:
            work.flights[-1].buffers = self._buffers(engine, size)

    def _check_own(self, contribution: Contribution) -> None:
        """Raise DivergedError if this replica's model is not finite, before it is sent to the others."""
        for name, change in contribution.tensors.items():
            if not all_finite(change):
                raise DivergedError(
                    f"after step {self.state.step} parameter {name!r} of this replica is not finite. The"
                    " other replicas go on without it: restart it, and it continues from a live peer. If it"
                    " diverges again, lower the learning rate or clip gradients"
                )

    def _buffers(self, engine: Engine, size: int) -> dict[str, torch.Tensor]:
        """Return shared copies of the buffers, so that a failure leaves the model's own as they are."""
        how, buffers = self._replica.config.buffers, self._replica.buffers
        if how == "local" or not buffers:
            return {}
        copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        self._run(engine, share_buffers(list(copies.values()), how, size), "buffers")
        return copies

    def _run(self, engine: Engine, program: Collectives[torch.Tensor], label: str) -> torch.Tensor:
        return engine.run(program, step=self.state.step, label=label)

    # After the vote

    def _commit(self, work: Work) -> None:
        """Take over the counts and residuals of a committed round. The averager applies its means."""
        replica, state, decision = self._replica, self.state, work.decision
        state.steps.restore(max(state.step, decision.step))
        if not work.flights:
            state.settled = state.settled or (decision.final and not decision.contributors)
            return
        work.memory.commit()
        if work.without_residuals is not None:
            replica.memory.take_shared(work.without_residuals)
        state.committed(decision.exchange)
        state.settled = decision.final
        if decision.final:
            # The plain mean of the models, x_i = a - D_i, without an outer step.
            anchors = replica.take_anchors()
            for flight in work.flights:
                anchors.move_to({name: anchors[name] - mean for name, mean in flight.means().items()})
                self.applied(flight)
            replica.write({name: anchors[name] for name in replica.parameters})
            replica.exchanges += len(work.flights)
            replica.window = 0
            if replica.config.optimizer_state == "reset":
                replica.reset_optimizers(list(replica.parameters))
            work.flights.clear()

    def _discard(self, work: Work | None, error: ThinwireError | None) -> None:
        """Keep the state as it was, and log why nothing was committed."""
        service = self.service
        complete = work is not None and not work.decision.blocked
        if complete and work is not None and work.flights and work.without_residuals is None:
            self.state.prepared = Prepared(work.decision.exchange, work.memory)
        # The first sentence. The others are advice for jobs that cannot continue.
        reason = str(error).partition(". ")[0] if error is not None else "the others did not commit it"
        if error is None and service.size < service.minimum:
            reason = (
                f"it had {service.size} replicas, and commits need at least {service.minimum}: start more"
                " replicas, or lower min_replicas"
            )
        if not self.joined:
            self._log_waiting(reason)
            return
        logger.warning(
            "the exchange after step %d was not committed: %s. Training continues from the local parameters,"
            " and the next exchange covers these steps too",
            self.state.step,
            reason,
        )

    def _blocked(self, work: Work) -> ThinwireError:
        """Return why replicas do not match; raise it if this one is the mismatched one."""
        decision, own = work.decision, self.service.rank
        if decision.different:
            text = f"{decision.named(decision.different)} is set up differently from the other replicas"
            if work.set_ups:
                found = differences_text(work.set_ups, lambda ranks: decision.named(frozenset(ranks)))
                text = f"{text}: {found}"
            error = MismatchError(f"{text}. {SAME_SET_UP}")
            if own in decision.different:
                raise error
            return error
        names = decision.named(decision.stale)
        if decision.first:
            error = MismatchError(
                f"{names} starts with other parameters than the other replicas, and Manager(init_sync=False)"
                " leaves it so: seed all of them alike before the model is made, or leave out init_sync"
            )
            if own in decision.stale:
                raise error
            return error
        if own in decision.stale:
            logger.warning("this replica's anchors differ from those of most others: it will receive theirs")
            self.service.fall_behind()
        return WireError(f"{names} has committed other exchanges than most replicas, and will receive theirs")

    # Waiting and logs

    def _deadline(self) -> float:
        return time.monotonic() + self.service.patience.total_seconds()

    def _pause(self, deadline: float, seconds: float) -> float:
        """Wait before another attempt, and return the seconds to wait before the one after it.

        Raises:
            WireError: The deadline is over.
        """
        service, left = self.service, deadline - time.monotonic()
        if left < 0:
            raise WireError(
                f"no exchange was committed within {service.patience.total_seconds():g} s, the last with"
                f" {service.size} replicas where at least {service.minimum} are needed: start more replicas,"
                " lower min_replicas, or raise quorum_timeout; see the log for each cause"
            )
        time.sleep(min(seconds, left))
        return min(2 * seconds, _LONGEST_PAUSE)

    def _log_waiting(self, reason: str) -> None:
        """Log why this replica has not joined, unless that was logged a moment ago: it keeps trying."""
        (logged, when), now = self._logged, time.monotonic()
        if reason != logged or now > when + _REPEATED:
            self._logged = reason, now
            logger.warning("this replica has not joined the others yet: %s", reason)

    def _log_members(self, names: tuple[str, ...]) -> None:
        """Log which replicas have joined and left since the last committed round."""
        left = [name for name in self.replicas if name not in names]
        new = [name for name in names if name not in self.replicas]
        step = self.state.step
        if left:
            memory = self._replica.memory
            residuals = [name for name in self._replica.parameters if memory.residuals_of(name)]
            shown = ", ".join(residuals[:_SHOWN]) + (" ..." if len(residuals) > _SHOWN else "")
            logger.warning(
                "%s left before step %d: %s. The %d replicas that remain keep theirs",
                ", ".join(left),
                step,
                f"its residuals of {shown} are lost" if residuals else "it had no residuals to lose",
                len(names),
            )
        if new and self.joined:
            logger.info("%s joined at step %d: %d replicas", ", ".join(new), step, len(names))
        if new and not self.joined:
            logger.info("joined %d replicas at step %d", len(names), step)
        self.replicas = names

    # Saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the history of exchanges, and the counts of the quorum service."""
        state = self.state
        counts = {"lineage": state.lineage, "exchange": state.last_exchange}
        return {_KEY: {**counts, "service": dict(self.service.state_dict())}}

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Validate a saved history, and return a function that applies it.

        Raises:
            StateError: The state does not fit, or this replica has joined already. Nothing was changed.
        """
        if self.joined or self.state.started:
            raise StateError("load_state_dict was called after this replica had joined: call it before")
        saved = state.get(_KEY)
        if not isinstance(saved, Mapping) or set(saved) != {"lineage", "exchange", "service"}:
            raise StateError("the state was not saved by a wire of thinwire.integrations.torchft")
        service = saved["service"]
        if not isinstance(service, Mapping) or set(service) != set(self.service.state_dict()):
            raise StateError(f"the state's service={service!r} is not one of this version of torchft")
        for name, value in {**saved, **service}.items():
            if name != "service":
                check_count(name, value)

        def apply() -> None:
            self.state.lineage, self.state.last_exchange = saved["lineage"], saved["exchange"]
            self.state.started = True
            self.service.load_state_dict(dict(service))

        return apply
