"""The replicas that average with each other: the protocol, and the fixed ranks of a process group."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.meter import MODELS
from thinwire.engine.ops import Collectives, among
from thinwire.monitors.audit import Findings
from thinwire.monitors.replicas import compare_replicas, fingerprints
from thinwire.programs.allreduce import Exact
from thinwire.programs.leftovers import WithLeftovers, set_aside
from thinwire.programs.memory import Memory
from thinwire.step.strategy import Context
from thinwire.strategies.averaging.exchange import (
    Contribution,
    ExchangeId,
    Members,
    ModelExchange,
    any_diverged,
    check_finite,
    compare_points,
    gather_diverged,
)
from thinwire.strategies.averaging.groups import members_of
from thinwire.strategies.averaging.policy import Average
from thinwire.strategies.averaging.replica import Replica
from thinwire.strategies.averaging.shared_state import mean_of_states, one_state, share_buffers

Contribute = Callable[[int, Memory], Contribution]
"""A function that returns this replica's contribution of a fragment, with a memory for its programs."""


@dataclass(eq=False)
class InFlight:
    """An average that was started, to be applied at step `due` of averaging.

    Attributes:
        fragment: The fragment that is averaged.
        due: The step of averaging after which it is applied.
        means: A function that waits for the means and returns them.
        contributors: The number of replicas whose steps the mean contains.
        everyone: Whether all replicas take part.
        ranks: The ranks that take part, in a fixed group.
        buffers: Buffers to copy when it is applied, by name.
        findings: The audit of this exchange, if there is one.
    """

    fragment: int
    due: int
    means: Callable[[], dict[str, torch.Tensor]]
    contributors: int
    everyone: bool = True
    ranks: tuple[int, ...] = ()
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    findings: Findings | None = None

    def keep(self) -> None:
        """Wait for the means, and keep them until they are due."""
        means = self.means()
        self.means = lambda: means


class Membership(Protocol):
    """The replicas that a replica averages with, and their exchanges.

    `Averager` decides when to exchange and applies the result. A membership decides with whom, and carries
    the tensors. Three kinds fit:

    - fixed ranks (`FixedGroup`): `exchange` starts collectives and returns. A lost rank ends the job.
    - a live quorum (`LiveReplicas`): `exchange` agrees on the replicas, averages, and lets the quorum vote. A
      failed exchange is discarded and training continues from the local parameters. A newcomer receives a
      live peer's state, contributes zeros, and the mean is rescaled to the contributors.
    - replicas that meet in an object store, which thinwire does not implement: `exchange` would upload this
      replica's contribution and return the means of the last closed round, perhaps none, with the number of
      its replicas in `contributors`.

    `Context.membership` makes it, and `FixedGroup` is the default. `integrations/live.py` passes another one
    to the run, and is the example to follow.
    """

    replicas: tuple[str, ...]
    """The names of the replicas in the last exchange that was applied."""
    neighbours: tuple[int, ...]
    """The ranks whose gradients are averaged with this one's in every step, by the option `within`."""
    to_unfreeze: str
    """How to train a parameter that was frozen at attach, for errors."""

    def check(self) -> None:
        """Raise the first failure so far that ends the job, without waiting."""

    def join(self) -> Iterator[InFlight]:
        """Wait until this replica may train; called with every forward.

        Yields:
            Averages that this replica took part in meanwhile, each to be applied before the next.

        Raises:
            WireError: There were not enough replicas in time.
            MismatchError: This replica is set up differently from the others.
        """

    def exchange(self, averages: Sequence[Average], step: int) -> list[InFlight]:
        """Start to average what is due after a step.

        Args:
            averages: The averages that are due.
            step: The step of averaging that has ended.

        Returns:
            The averages in flight. Empty if the exchange failed and was discarded.

        Raises:
            WireError: A failure that ends the job.
        """

    def applied(self, flight: InFlight) -> None:
        """React to an average that was applied: share buffers and optimizer states, compare replicas."""

    def synchronise(self, memory: Memory) -> Iterator[InFlight]:
        """Set all replicas to their exact mean, less the residuals of `memory`, which it drops.

        Yields:
            Averages that are to be applied first, because other replicas still train.
        """

    def retire(self, trained_locally: bool) -> None:
        """Prepare to stop averaging while training continues. Collective.

        Args:
            trained_locally: Whether optimizer states may differ between replicas.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the membership's own entries of the wire's saved state, by key."""

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Validate a wire's saved state, and return a function that applies the membership's entries.

        Raises:
            StateError: The state does not fit. Nothing was changed.
        """

    def close(self) -> None:
        """Stop without synchronising replicas."""


class FixedGroup:
    """A membership of all ranks, or of disjoint groups of them, on a separate process group.

    Constructing one is collective.

    Args:
        replica: This rank's replica.
        contribute: Returns this replica's contribution of a fragment.
        context: The objects that the wire's strategies share.
    """

    to_unfreeze = "call wire.swap(wire.program) after unfreezing it, on every rank"

    def __init__(self, replica: Replica, contribute: Contribute, context: Context) -> None:
        model = context.model
        self._replica, self._contribute = replica, contribute
        self._steps, self._check_every = context.steps, context.check_every
        self._communicator = GroupCommunicator(model.group, context.communicator.limit, model.device)
        self._communicator.open()
        try:
            config, communicator = replica.config, self._communicator
            self.everyone = tuple(range(communicator.size))
            self.neighbours = members_of(config.within, communicator, model.group)
            self._groups = {
                groups: members_of(groups, communicator, model.group) for groups in config.groups()
            }
            some = (ranks for ranks in self._groups.values() if ranks != self.everyone)
            communicator.connect_subgroups(some)
            if config.within is not None:  # their gradients are averaged on the wire's own group
                context.communicator.connect_subgroups([self.neighbours])
        except BaseException:
            self._communicator.close()
            raise
        self._engine = Engine(communicator, device=model.device, meter=context.engine.meter, purpose=MODELS)
        self.replicas = tuple(f"rank {rank}" for rank in self._engine.world_ranks(self.everyone))

    def check(self) -> None:
        """Raise the first failure of an exchange so far, without waiting."""
        self._engine.check()

    def join(self) -> Iterator[InFlight]:
        """Yield nothing: all ranks take part from the start."""
        return iter(())

    def exchange(self, averages: Sequence[Average], step: int) -> list[InFlight]:
        """Start the averages, to be applied after the configuration's overlap.

        The collectives run on this membership's own engine and process group while the next backward passes
        run on the gradients'. Every rank starts the same averages after the same step, so exchanges of
        several fragments in flight are in the same order on all ranks.
        """
        loop = self._replica.config.outer_loop
        flights = []
        for average in averages:
            ranks = self.everyone if average.among is None else self._groups[average.among]
            contribution = self._contribute(average.fragment, self._replica.memory)
            point = ExchangeId(self._steps.count, average.fragment)
            exchange = ModelExchange(self._engine, point, contribution, self._members(ranks))
            flight = InFlight(
                average.fragment,
                due=step + (0 if loop is None else loop.overlap),
                means=exchange.means,
                contributors=len(ranks),
                everyone=ranks == self.everyone,
                ranks=ranks,
                findings=contribution.findings,
            )
            flights.append(flight)
        return flights

    def applied(self, flight: InFlight) -> None:
        """Share optimizer states and buffers among the ranks of an average, and compare replicas if due."""
        replica, last = self._replica, flight.fragment == len(self._replica.fragments) - 1
        ranks = flight.ranks or self.everyone
        if replica.config.optimizer_state == "mean":
            names = replica.fragments[flight.fragment]
            parameters = [replica.parameters.whole[name] for name in names]
            self._run(mean_of_states(parameters, replica.optimizers, len(ranks)), ranks, "optimizer state")
        if last:
            self._share_buffers(ranks)
        if last and flight.everyone:
            replica.whole += 1
            if self._check_every and replica.whole % self._check_every == 0:
                self._compare()

    def synchronise(self, memory: Memory) -> Iterator[InFlight]:
        """Set all models to the exact mean of parameters, less the residuals of a memory. Collective.

        A residual is a part of this rank's pseudo-gradients, anchor - parameters, that was not yet averaged.
        The plain mean is taken, not an outer step: momentum would move the model although nothing was
        learned, and twice for two calls.
        """
        yield from ()  # no average precedes it: all ranks call it at the same step
        replica = self._replica
        set_aside(memory)
        program = gather_diverged(
            self._steps.count, bool(replica.window) or memory.has_leftovers, replica.device
        )
        gathered = self._run(program, self.everyone, "the comparison of steps")
        compare_points(gathered, self._engine.world_ranks(self.everyone))
        if not any_diverged(gathered):
            return
        contribution = Contribution(
            replica.parameters,
            WithLeftovers(Exact(), sign=-1),
            memory,
            number=replica.exchanges // len(replica.fragments),
        )
        point = ExchangeId(self._steps.count, None)
        means = ModelExchange(self._engine, point, contribution, self._members(self.everyone)).means()
        check_finite(means, self._steps.count)
        replica.write(means)
        self._share_buffers(self.everyone)
        if replica.anchors is not None:
            replica.anchors.move_to(replica.parameters)
        replica.window = 0

    def retire(self, trained_locally: bool) -> None:
        """Make optimizer states equal on all ranks, then wait for all of them. Collective."""
        replica, communicator = self._replica, self._communicator
        if trained_locally:
            # Equal gradients keep models equal only if moments and step counts are equal too.
            parameters = [replica.parameters.whole[name] for names in replica.fragments for name in names]
            states = one_state(parameters, replica.optimizers, len(self.everyone))
            self._run(states, self.everyone, "optimizer state")
        # A rank that closes its connections first could cut off another's last collective.
        communicator.rendezvous.gather("retire", "", communicator.limit)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the averager's state is all that a fixed group needs."""
        return {}

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that does nothing."""
        return lambda: None

    def close(self) -> None:
        """Leave the process group."""
        self._engine.close()

    def _members(self, ranks: tuple[int, ...]) -> Members:
        return Members(ranks, self._communicator.rank, self._communicator.size)

    def _run(self, program: Collectives[torch.Tensor], ranks: tuple[int, ...], label: str) -> torch.Tensor:
        limited = program if ranks == self.everyone else among(ranks, program)
        return self._engine.run(limited, step=self._steps.count, label=label)

    def _share_buffers(self, ranks: tuple[int, ...]) -> None:
        buffers, how = list(self._replica.buffers.values()), self._replica.config.buffers
        if buffers and how != "local":
            self._run(share_buffers(buffers, how, len(ranks)), ranks, "buffers")

    def _compare(self) -> None:
        """Compare across ranks the anchors, or the parameters that were just averaged."""
        replica = self._replica
        held, names = (
            replica.parameters if replica.anchors is None else replica.anchors,
            list(replica.parameters),
        )
        own = fingerprints(held[name] for name in names)
        ranks = self._engine.world_ranks(self.everyone)
        check = compare_replicas(names, own, self._steps.count, ranks)
        self._run(check, self.everyone, "the comparison of replicas")
