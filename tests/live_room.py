"""Live replicas as threads of one process, with a quorum service and a group in memory.

Faults are planned by round and by the number of the collective in it, so that every interleaving that a
network may produce can be named, and repeated.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from thinwire.checkpoint.trees import copied
from thinwire.engine.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange
from thinwire.engine.simulate import exchange
from thinwire.integrations.live import attach_live
from thinwire.models.local import LocalModel
from thinwire.strategies.averaging.averager import Averager
from thinwire.strategies.averaging.handover import LiveState
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.averaging.quorum import LiveReplicas

SECONDS = 60
SET_UP = {"program": "DiLoCo", "option min_replicas": "2"}


class KilledError(BaseException):
    """Ends a replica's thread, as kill -9 ends a process."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one collective of one round on one rank.

    Attributes:
        round: The number of the round, from 0.
        place: The replica's number.
        call: The number of the collective in the round. Beyond the last, nothing happens.
        dies: Whether the replica dies, or only does not receive this collective's result.
    """

    round: int
    place: int
    call: int
    dies: bool = True


@dataclass
class Hub:
    """The collectives of one round. Each waits until all replicas have called it."""

    size: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    calls: dict[int, dict[int, Any]] = field(default_factory=dict)
    results: dict[int, list[Any]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    broken: bool = False

    def issue(self, rank: int, op: Any) -> int:
        with self.lock:
            if self.broken:
                raise RuntimeError("the connection is closed")
            number = self.counts.get(rank, 0)
            self.counts[rank] = number + 1
            self.calls.setdefault(number, {})[rank] = op
            if len(self.calls[number]) == self.size:
                self.results[number] = exchange([self.calls[number][rank] for rank in range(self.size)])
                self.lock.notify_all()
            return number

    def wait(self, number: int) -> list[Any]:
        with self.lock:
            self.lock.wait_for(lambda: number in self.results or self.broken, SECONDS)
            if number not in self.results:
                raise RuntimeError("the connection was closed by a peer")
            return self.results[number]

    def abort(self) -> None:
        with self.lock:
            self.broken = True
            self.lock.notify_all()


class Pending:
    """A collective in flight, in the form of torch's Work."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._done = False

    def is_completed(self) -> bool:
        return self._done

    def wait(self) -> None:
        self._finish()
        self._done = True


class Room:
    """The service that agrees on the replicas of each round, and the faults that it plans.

    Args:
        minimum: Replicas that a round needs to be committed.
        faults: What goes wrong.
        late: Pairs of a round and a replica that comes too late for it.
    """

    def __init__(
        self, minimum: int = 1, faults: tuple[Fault, ...] = (), late: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        self.minimum, self.faults, self.late = minimum, faults, late
        self.lock = threading.Condition()
        self.expected: set[int] = set()
        self.waiting: dict[int, Seat] = {}
        self.rounds = 0

    def take_part(self, seat: "Seat") -> None:
        """Wait until all expected replicas, but those that are late, are there."""
        with self.lock:
            self.waiting[seat.place] = seat
            self._form()
            self.lock.notify_all()
            assert self.lock.wait_for(lambda: seat.place not in self.waiting, SECONDS), "no quorum"

    def leave(self, place: int) -> None:
        with self.lock:
            self.expected.discard(place)
            self._form()
            self.lock.notify_all()

    def _form(self) -> None:
        absent = {place for number, place in self.late if number == self.rounds}
        wanted = self.expected - absent or self.expected
        if not wanted or not wanted <= self.waiting.keys():
            return
        seats = [self.waiting.pop(place) for place in sorted(wanted)]
        hub, number = Hub(len(seats)), self.rounds
        self.rounds += 1
        best = max(seats, key=lambda seat: seat.position)
        given = copied(best.state.donate()) if best.state is not None else None
        for rank, seat in enumerate(seats):
            seat.configure(rank, len(seats), number, hub)
            behind = seat.position < best.position or (best.position == 0 and seat is not best)
            seat.given = (given, best.position) if behind else None


class Seat:
    """One replica's view of the room: its quorum service, and its group."""

    limit = patience = timedelta(seconds=SECONDS)

    def __init__(self, room: Room, place: int, life: int) -> None:
        self.room, self.place, self.name = room, place, f"replica {place}.{life}"
        self.state: LiveState | None = None
        self.group = self
        self.position = 0
        self.given: Any = None
        self.dead = False

    @property
    def minimum(self) -> int:
        return self.room.minimum

    @property
    def error(self) -> str | None:
        return None

    def configure(self, rank: int, size: int, number: int, hub: Hub) -> None:
        self.rank, self.size, self.number, self.hub = rank, size, number, hub

    def begin(self, limit: timedelta) -> None:
        self.room.take_part(self)
        if self.given is not None:
            assert self.state is not None
            state, self.position = self.given
            self.state.receive(state)

    def vote(self, error: Exception | None) -> bool:
        if self.dead:
            raise KilledError
        committed = error is None and self.size >= self.minimum
        self.position += committed
        return committed

    def fall_behind(self) -> None:
        self.position = 0

    def abort(self) -> None:
        self.hub.abort()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def _call(self, op: Any, deliver: Callable[[Any], object]) -> Pending:
        number = self.hub.counts.get(self.rank, 0)
        hub, rank = self.hub, self.rank
        fault = next(
            (
                fault
                for fault in self.room.faults
                if (fault.round, fault.place, fault.call) == (self.number, self.place, number)
            ),
            None,
        )
        if fault is not None and fault.dies:
            self.dead = True
            hub.abort()
            raise RuntimeError("killed")
        number = hub.issue(rank, op)

        def finish() -> None:
            result = hub.wait(number)[rank]
            if fault is not None:
                raise RuntimeError("the result did not arrive")
            deliver(result)

        return Pending(finish)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Pending:
        return self._call(AllReduce(tensors[0].clone()), tensors[0].copy_)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Pending:
        def deliver(rows: torch.Tensor) -> None:
            for into, row in zip(outputs[0], rows, strict=True):
                into.copy_(row)

        return self._call(AllGather(inputs[0].clone()), deliver)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, outs: list[int], ins: list[int], opts: Any
    ) -> Pending:
        if ins:
            return self._call(Exchange(given.clone(), tuple(ins), tuple(outs)), output.copy_)
        return self._call(AllToAll(given.clone()), output.copy_)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Pending:
        return self._call(Broadcast(tensors[0].clone(), opts.rootRank), tensors[0].copy_)


_SEEDING = threading.Lock()


def model(seed: int) -> torch.nn.Module:
    with _SEEDING:  # all threads share torch's generator
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))


class Life:
    """One life of one replica: what it holds, and what has happened to it."""

    def __init__(self, room: Room, place: int, life: int, config: Averaging, **options: Any) -> None:
        self.seat = Seat(room, place, life)
        self.module = model(100 * place + life)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=0.05)
        set_up = options.pop("set_up", SET_UP)
        group: Any = self.seat
        self.wire, self.state = attach_live(
            self.seat,
            LocalModel(self.module, group),
            config,
            optimizers=[self.optimizer],
            set_up=set_up,
            **options,
        )
        self.seat.state = self.state
        self.replica = self.state.replica
        strategy: Any = self.wire._runner.strategy
        self.averager: Averager = strategy
        self.membership: LiveReplicas = strategy.membership
        self.error: BaseException | None = None
        self.uncommitted = 0
        discard = self.membership._discard
        self.membership._discard = lambda *args: self._discarded(discard, *args)

    def _discarded(self, discard: Callable[..., None], *args: Any) -> None:
        self.uncommitted += 1
        discard(*args)

    def residuals(self) -> dict[str, torch.Tensor]:
        return {
            name: found[0].clone()
            for name in self.replica.parameters
            if (found := self.replica.memory.residuals_of(name))
        }

    def train(self, steps: int) -> None:
        """Train to the end, on gradients that depend on the replica and the step alone."""
        self.wire.join()
        while self.wire.step < steps:
            self.step()
        self.wire.finalize()

    def step(self) -> None:
        seeded = torch.Generator().manual_seed(1000 * self.seat.place + self.wire.step)
        self.averager.begin()  # as the model's forward does
        for parameter in self.module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=seeded)
        with torch.no_grad():
            self.module[1].running_mean.add_(self.seat.place)  # type: ignore[index]
        self.optimizer.step()


def run(
    room: Room, config: Averaging, *, replicas: int, steps: int, returns: Mapping[int, int] | None = None
) -> list[list[Life]]:
    """Run a job; return the lives of each replica. A dead replica comes back as often as `returns` says."""
    lives: list[list[Life]] = [[] for _ in range(replicas)]
    room.expected = set(range(replicas))

    def live(place: int) -> None:
        for number in range(1 + (returns or {}).get(place, 0)):
            if number:
                with room.lock:
                    room.expected.add(place)
            life = Life(room, place, number, config)
            lives[place].append(life)
            try:
                life.train(steps)
                return
            except KilledError as error:
                life.error = error
            except BaseException as error:
                life.error = error
                return
            finally:
                room.leave(place)

    threads = [threading.Thread(target=live, args=(place,), daemon=True) for place in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), "a replica hangs"
    return lives
