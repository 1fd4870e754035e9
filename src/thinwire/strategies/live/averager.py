"""Averages of a replica's model with whichever replicas are there, committed together or not at all."""

import logging
import time
from collections.abc import Mapping
from datetime import timedelta

from thinwire.engine.comm.agreement import differences_text
from thinwire.engine.engine import Engine
from thinwire.engine.futures import at_work
from thinwire.engine.meter import MODELS, Meter
from thinwire.engine.profiling import span
from thinwire.errors import AttachError, MismatchError, ThinwireError, WireError
from thinwire.programs.program import Program
from thinwire.strategies.averaging.local_parts import no_autograd
from thinwire.strategies.averaging.shared_state import reset_states
from thinwire.strategies.live.exchange import Exchange, Work
from thinwire.strategies.live.handshake import Decision, hashed
from thinwire.strategies.live.membership import LiveCommunicator, Membership
from thinwire.strategies.live.replica import SAME_SET_UP, Prepared, Replica
from thinwire.strategies.live.status import OneRank, ReplicaRanks, ReplicaStatus, agree

logger = logging.getLogger("thinwire")

_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two attempts. They double, since torchft logs each attempt of a replica that is alone."""
_LEAST = 5.0
"""Seconds that an attempt to exchange has at least, where fewer are left of the time limit."""
_REPEATED = 60.0
"""Seconds between two logs of the same reason why a replica has not joined."""
_SHOWN = 5


class LiveAverager:
    """The exchanges of one replica. Every method that exchanges waits for the other replicas.

    If an exchange fails, nothing of it is used on any replica that noticed, and training goes on from where
    it is: anchors, residuals and counts are as before, and the next exchange carries both windows. A replica
    that missed a commit of the others is given their state in the next exchange.

    Args:
        membership: The service that agrees on the replicas of each exchange.
        replica: This rank's state of its replica.
        exceptions: Parameters that use another program than the configuration's, with that program.
        meter: Where exchanges are recorded.
        check_every: Committed exchanges between two comparisons of the anchors' bits. 0: never.
        ranks: The ranks of this replica.
    """

    def __init__(
        self,
        membership: Membership,
        replica: Replica,
        exceptions: Mapping[str, Program],
        *,
        meter: Meter,
        check_every: int = 0,
        ranks: ReplicaRanks | None = None,
    ) -> None:
        self.joined = False
        self.replicas: tuple[str, ...] = ()
        """The names of the replicas in the last committed exchange."""
        self._membership = membership
        self._replica = replica
        self._exceptions = exceptions
        self._meter = meter
        self._check_every = check_every
        self._ranks = ranks or OneRank()
        self._logged: tuple[str, float] = ("", 0.0)

    def join(self) -> None:
        """Wait for the other replicas' next exchange, and take over their state. Later calls do nothing.

        Raises:
            WireError: There were not enough replicas in time.
            MismatchError: This replica is set up differently from the others.
        """
        self._join(self._deadline())

    def _join(self, deadline: float) -> None:
        pause = _PAUSE
        while not self.joined:
            if self._round(deadline) is None:
                pause = self._pause(deadline, pause)

    def step_ended(self) -> None:
        """Count a training step, and exchange what is due after it."""
        if not self.joined:
            raise AttachError(
                "the optimizer has stepped before this replica joined the others: call the attached model,"
                " model(...), whose forward joins them, or wire.join()"
            )
        self._replica.count_step()
        if self._replica.config.due(self._replica.step):
            with span("averaging"):
                self._round(self._deadline())

    def finalize(self) -> None:
        """Set all models to their exact mean, with the replicas that have ended their training too.

        A last exchange without content tells a replica that it may leave: until then it may be the only one
        that can bring another up to date.

        Raises:
            WireError: There were not enough replicas in time.
        """
        deadline = self._deadline()
        self._join(deadline)
        pause = _PAUSE
        while True:
            decision = None
            try:
                decision = self._round(deadline, final=True)
            except WireError:
                if not self._replica.settled:
                    raise
                logger.info("the other replicas have left, with the same model as this one")
            if decision is None and self._replica.settled:
                return
            if decision is not None and decision.final and not decision.contributors:
                return
            if decision is None:
                pause = self._pause(deadline, pause)
            else:
                deadline, pause = self._deadline(), _PAUSE  # others are still training

    def _deadline(self) -> float:
        return time.monotonic() + self._membership.patience.total_seconds()

    def _pause(self, deadline: float, seconds: float) -> float:
        """Wait before another attempt, and return the seconds to wait before the one after it.

        Raises:
            WireError: The deadline is over.
        """
        membership, left = self._membership, deadline - time.monotonic()
        if left < 0:
            raise WireError(
                f"no exchange was committed within {membership.patience.total_seconds():g} s, the last with"
                f" {membership.size} replicas where at least {membership.minimum} are needed: start more"
                " replicas, lower min_replicas, or raise quorum_timeout; the log has each cause"
            )
        time.sleep(min(seconds, left))
        return min(2 * seconds, _LONGEST_PAUSE)

    def _round(self, deadline: float, *, final: bool = False) -> Decision | None:
        """Run one exchange; return what its roll call has shown if it was committed, else None.

        Args:
            deadline: When to stop waiting for other replicas.
            final: Whether this replica has ended its training.
        """
        membership, replica = self._membership, self._replica
        replica.anchors  # noqa: B018 - taken now, before a peer may ask for them
        with at_work(), no_autograd():
            try:
                membership.begin(timedelta(seconds=max(_LEAST, deadline - time.monotonic())))
            except BaseException:
                membership.abort()  # the others may be connected already, and would wait for this replica
                raise
            replica.prepared = None  # a peer's state has told by now whether it was committed
            work, error = self._attempt(final)
            if not membership.vote(error):
                self._give_up(work, error)
                return None
            assert work is not None, "a vote without an error"
            self._apply(work)
            self._note(work.decision.names)
        self.joined = True
        return work.decision

    def _attempt(self, final: bool) -> tuple[Work | None, ThinwireError | None]:
        """Exchange with the replicas that are there; return what was computed, and the failure."""
        communicator = LiveCommunicator(self._membership)
        try:
            standing = self._standing(final)
        except BaseException:
            communicator.abort()  # a rank of this replica is lost, and the others go on without all of it
            raise
        if standing.connected:
            work, error = self._exchange(standing, communicator, final)
        else:
            reason = self._membership.error or "another of its ranks is not connected"
            work, error = None, WireError(f"this replica could not connect to the others: {reason}")
            communicator.abort()
        communicator.release()
        return work, error

    def _standing(self, final: bool) -> ReplicaStatus:
        """Agree with the other ranks of this replica on what to tell the other replicas."""
        replica, every = self._replica, self._check_every
        return agree(
            self._ranks,
            replica,
            connected=self._membership.error is None,
            final=final,
            check=bool(every) and replica.exchanges % every == 0,
        )

    def _exchange(
        self, standing: ReplicaStatus, communicator: LiveCommunicator, final: bool
    ) -> tuple[Work | None, ThinwireError | None]:
        membership, replica = self._membership, self._replica
        engine = Engine(communicator, device=replica.device, meter=self._meter, purpose=MODELS)
        exchange = Exchange(membership, replica, standing, engine, self._exceptions)
        work: Work | None = None
        error: ThinwireError | None = None
        try:
            work = exchange.run(final=final)
            if work.decision.blocked:
                error = self._blocked(work)
            else:
                exchange.acknowledge()
        except WireError as failure:
            communicator.abort()  # now: the engine's own thread for it may come after `release`
            error = failure
        except BaseException as failure:
            communicator.abort()  # the others fail at once, and go on without this replica
            if isinstance(failure, Exception):
                membership.vote(failure)
            raise
        finally:
            engine.close()
        return work, error

    def _blocked(self, work: Work) -> ThinwireError:
        """Return why replicas do not fit together; raise it if this one is the mismatched one."""
        decision, own = work.decision, self._membership.rank
        if decision.different:
            names = ", ".join(decision.names[rank] for rank in sorted(decision.different))
            text = f"{names} is set up differently from the other replicas"
            if work.set_ups:
                found = differences_text(
                    work.set_ups, lambda ranks: ", ".join(decision.names[rank] for rank in ranks)
                )
                text = f"{text}: {found}"
            error = MismatchError(f"{text}. {SAME_SET_UP}")
            if own in decision.different:
                raise error
            return error
        names = ", ".join(decision.names[rank] for rank in sorted(decision.stale))
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
            self._membership.fall_behind()
        return WireError(f"{names} has committed other exchanges than most replicas, and will receive theirs")

    def _give_up(self, work: Work | None, error: ThinwireError | None) -> None:
        """Keep the state as it was, and log why nothing was committed."""
        membership, replica = self._membership, self._replica
        complete = work is not None and not work.decision.blocked
        if complete and work is not None and work.means and work.without_residuals is None:
            replica.prepared = Prepared(work.decision.exchange, work.memory)
        # The first sentence. The others are advice for jobs that cannot continue.
        reason = str(error).partition(". ")[0] if error is not None else "the others did not commit it"
        if error is None and membership.size < membership.minimum:
            reason = (
                f"it had {membership.size} replicas, and commits need at least {membership.minimum}: start"
                " more replicas, or lower min_replicas"
            )
        if not self.joined:
            self._log_waiting(reason)
            return
        logger.warning(
            "the exchange after step %d was not committed: %s. Training goes on, and the next exchange covers"
            " these steps too",
            replica.step,
            reason,
        )

    def _log_waiting(self, reason: str) -> None:
        """Log why this replica has not joined, unless that was logged a moment ago. It tries all the time."""
        (logged, when), now = self._logged, time.monotonic()
        if reason != logged or now > when + _REPEATED:
            self._logged = reason, now
            logger.warning("this replica has not joined the others yet: %s", reason)

    def _apply(self, work: Work) -> None:
        """Use what was committed."""
        replica, decision = self._replica, work.decision
        replica.step = max(replica.step, decision.step)
        if not work.fragments:
            replica.settled = replica.settled or (decision.final and not decision.contributors)
            return
        names = [name for fragment in work.fragments for name in replica.fragments[fragment]]
        work.memory.commit()
        if decision.final:
            replica.anchors.move_to({name: replica.anchors[name] - work.means[name] for name in names})
        else:
            if work.without_residuals is not None:
                replica.memory.take_shared(work.without_residuals)
            for fragment in work.fragments:
                if replica.loop.tuning is not None:
                    replica.anchors.tune(fragment, replica.loop.tuning(decision.contributors))
                replica.anchors.step(fragment, work.means)
        replica.return_to_anchors(names)
        for name, buffer in work.buffers.items():
            replica.buffers[name].copy_(buffer)
        if replica.config.optimizer_state == "reset":
            reset_states([replica.trained[name] for name in names], replica.optimizers)
        replica.exchanges += len(work.fragments)
        replica.lineage = hashed(replica.lineage, decision.exchange)
        replica.last_exchange, replica.settled = decision.exchange, decision.final
        if decision.final or len(replica.fragments) == 1:
            replica.window = 0

    def _note(self, names: tuple[str, ...]) -> None:
        """Log which replicas have come and gone since the last committed exchange."""
        left = [name for name in self.replicas if name not in names]
        came = [name for name in names if name not in self.replicas]
        if left:
            residuals = self._replica.residual_names()
            shown = ", ".join(residuals[:_SHOWN]) + (" ..." if len(residuals) > _SHOWN else "")
            logger.warning(
                "%s left before step %d: %s. The %d replicas that remain keep theirs",
                ", ".join(left),
                self._replica.step,
                f"its residuals of {shown} are lost" if residuals else "it had no residuals to lose",
                len(names),
            )
        if came and self.joined:
            logger.info("%s joined at step %d: %d replicas", ", ".join(came), self._replica.step, len(names))
        if came and not self.joined:
            logger.info("joined %d replicas at step %d", len(names), self._replica.step)
        self.replicas = names
