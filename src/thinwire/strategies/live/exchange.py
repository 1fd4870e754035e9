"""One exchange among the replicas that are there. Nothing of it is applied here."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.engine.engine import Engine
from thinwire.engine.ops import AllGather, Collectives
from thinwire.errors import DivergedError, WireError
from thinwire.programs.allreduce import Exact
from thinwire.programs.finite import all_finite
from thinwire.programs.memory import Memory, Staged
from thinwire.programs.program import NO_EXCEPTIONS, Program
from thinwire.strategies.averaging.exchange import Members, ModelExchange, check_finite, packed
from thinwire.strategies.averaging.exchange_id import ExchangeId
from thinwire.strategies.averaging.shared_state import share_buffers
from thinwire.strategies.live.handshake import Decision, Row, decide, decoded, gather_rows
from thinwire.strategies.live.membership import Membership
from thinwire.strategies.live.replica import Replica
from thinwire.strategies.live.status import ReplicaStatus


@dataclass(eq=False)
class Work:
    """The results of an exchange, applied when it is committed.

    Attributes:
        decision: What the roll call has shown.
        set_ups: The set-ups of all replicas by rank, if they differ and could be gathered.
        fragments: The fragments that were exchanged; all of them at the end of the training.
        means: The mean pseudo-gradients by name.
        buffers: The shared buffers by name.
        memory: The programs' memory after the exchange.
        without_residuals: The memory that `memory` commits to, if this replica contributed nothing.
    """

    decision: Decision
    set_ups: tuple[Mapping[str, str], ...] = ()
    fragments: tuple[int, ...] = ()
    means: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: Staged = field(default_factory=lambda: Memory().staged())
    without_residuals: Memory | None = None


class Exchange:
    """One exchange on an engine of its own, which ends with it.

    Args:
        membership: The membership, after its `begin`.
        replica: This replica's state. Nothing of it is changed.
        standing: What its ranks have agreed on.
        engine: The engine, on a communicator of this exchange.
        exceptions: Parameters that use another program than the configuration's, with that program.
    """

    def __init__(
        self,
        membership: Membership,
        replica: Replica,
        standing: ReplicaStatus,
        engine: Engine,
        exceptions: Mapping[str, Program],
    ) -> None:
        self._replica = replica
        self._standing = standing
        self._membership = membership
        self._exceptions = exceptions
        self._engine = engine
        self._members = Members(tuple(range(membership.size)), membership.rank, membership.size)

    def run(self, *, final: bool) -> Work:
        """Run the exchange, up to the point where this replica has received everything.

        Args:
            final: Whether this replica has ended its training.

        Returns:
            What to apply. If the decision is blocked, there is nothing to apply.

        Raises:
            WireError: A replica died or stalled.
            DivergedError: This replica's model holds inf or NaN.
        """
        work = Work(self._handshake(final))
        if work.decision.different:
            with contextlib.suppress(WireError, ValueError):  # of another version, which does not send it
                work.set_ups = self._set_ups()
        if not work.decision.blocked:
            self._average(work)
        return work

    def acknowledge(self) -> None:
        """Wait until all replicas have received everything.

        This is what makes a partial commit unlikely. Without it, a replica that dies while it sends its last
        bytes would leave one peer with all means and another without.

        Raises:
            WireError: A replica died or stalled. Others may have received all acknowledgements.
        """
        received = torch.ones(1, dtype=torch.int32, device=self._replica.device)
        self._run(_gather(received), "the acknowledgement")

    def _handshake(self, final: bool) -> Decision:
        replica, membership, standing = self._replica, self._membership, self._standing
        own = Row(
            set_up=replica.set_up_hash,
            lineage=standing.lineage,
            position=membership.position,
            step=standing.step,
            window=standing.window,
            final=final,
            mixed=standing.mixed,
            nonce=standing.nonce,
            name=membership.name,
        )
        gathered = self._run(gather_rows(own, replica.device), "the roll call")
        return decide([decoded(row) for row in gathered.cpu()])

    def _set_ups(self) -> tuple[Mapping[str, str], ...]:
        """Return the set-ups of all replicas, by rank."""
        device = self._replica.device
        text = json.dumps(self._replica.set_up).encode()
        length = torch.tensor([len(text)], dtype=torch.int64, device=device)
        sizes = self._run(_gather(length), "the sizes of set-ups")
        padded = bytearray(text.ljust(int(sizes.max()), b" "))
        rows = self._run(_gather(torch.frombuffer(padded, dtype=torch.uint8).to(device)), "set-ups")
        return tuple(json.loads(bytes(row.tolist())) for row in rows.cpu())

    def _average(self, work: Work) -> None:
        """Fill in what the replicas exchange at this point, if anything."""
        replica, decision = self._replica, work.decision
        every = range(len(replica.fragments))
        due = every if decision.final else sorted({one.fragment for one in replica.config.due(decision.step)})
        if not decision.contributors or not due:
            return
        work.fragments = tuple(due)
        if decision.final:
            work.means = self._means(decision, due, Exact(), work.memory)
        else:
            if not replica.window:  # its residuals stay for the exchange in which it contributes again
                work.without_residuals = replica.memory.shared()
            work.memory = (work.without_residuals or replica.memory).staged()
            for one in due:
                program = replica.loop.program
                work.means |= self._means(decision, [one], program, work.memory, self._exceptions)
        share = self._members.size / decision.contributors  # of those that are not new, and sent zeros
        if share != 1:
            work.means = {name: mean * share for name, mean in work.means.items()}
        check_finite(work.means, decision.step)
        if due[-1] == every[-1]:
            work.buffers = self._buffers()

    def _means(
        self,
        decision: Decision,
        fragments: Sequence[int],
        program: Program,
        memory: Memory,
        exceptions: Mapping[str, Program] = NO_EXCEPTIONS,
    ) -> dict[str, torch.Tensor]:
        replica, changes = self._replica, dict[str, torch.Tensor]()
        for one in fragments:
            changes |= replica.anchors.pseudo_gradients(one, replica.parameters)
        for name, change in changes.items():
            if not all_finite(change):
                raise DivergedError(
                    f"after step {replica.step} parameter {name!r} of this replica is not finite. The other"
                    " replicas go on without it: restart it, and it continues from a live peer. If it"
                    " diverges again, lower the learning rate or clip gradients"
                )
        number = replica.exchanges // len(replica.fragments)
        work = packed(changes, program, exceptions, self._members, number)
        complex_names = {name for name, change in changes.items() if change.is_complex()}
        point = ExchangeId(decision.step, None if decision.final else fragments[0])
        return ModelExchange(self._engine, point, work, complex_names, memory, self._members).means()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return shared copies of the buffers, so that a failure leaves the model's own as they are."""
        how = self._replica.config.buffers
        if how == "local" or not self._replica.buffers:
            return {}
        copies = {name: one.detach().clone() for name, one in self._replica.buffers.items()}
        self._run(share_buffers(list(copies.values()), how, self._members.size), "buffers")
        return copies

    def _run(self, steps: Collectives[torch.Tensor], label: str) -> torch.Tensor:
        return self._engine.run(steps, step=self._replica.step, label=label)


def _gather(own: torch.Tensor) -> Collectives[torch.Tensor]:
    """Gather the tensors of all replicas."""
    gathered: torch.Tensor = yield AllGather(own)
    return gathered
