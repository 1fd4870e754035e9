"""A model of an accelerator's streams, events, futures and memory, for tests on the CPU.

Every operation of torch is put on the current stream. Each stream has a clock of all streams' work that it
comes after. Two accesses of one place, of which one writes, must be ordered by these clocks. A freed tensor's
memory goes to the next tensor that its stream allocates, so by then that stream must come after all other
streams' use of it, unless the use was recorded.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.engine.ops import AllToAll
from thinwire.engine.simulate import deliver

Clock = dict[str, int]
"""How much of each stream's work is done."""


@dataclass
class Use:
    """An access of a part of a tensor's memory."""

    stream: str
    time: int
    start: int
    end: int
    writes: bool
    what: str


@dataclass
class Block:
    """The memory of a tensor."""

    stream: str
    alive: StorageWeakRef
    uses: list[Use] = field(default_factory=list)
    recorded: dict[str, "Queue"] = field(default_factory=dict)
    """Streams that torch waits for before it reuses the memory, from when it is freed."""
    done: Clock = field(default_factory=dict)
    """What these have to do until then, once it is freed."""


class Queue:
    """A stream: a queue of work, which comes after what its clock says."""

    def __init__(self, model: "Model", name: str) -> None:
        self.model, self.name = model, name
        self.clock: Clock = {name: 0}

    def wait_stream(self, other: "Queue") -> None:
        self.wait_clock(other.clock)
        self.model.log.append(("wait", self.name, other.name))

    def wait_event(self, event: "Event") -> None:
        self.wait_clock(event.clock)
        self.model.log.append(("wait", self.name, event.name))

    def wait_clock(self, clock: Clock) -> None:
        for name, time in clock.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def comes_after(self, use: Use) -> bool:
        return self.clock.get(use.stream, 0) >= use.time


class Event:
    """A point in a stream's work."""

    def __init__(self) -> None:
        self.name, self.clock = "", Clock()

    def record(self, stream: Queue) -> None:
        self.name, self.clock = stream.name, dict(stream.clock)

    def query(self) -> bool:
        return True


class Model(TorchDispatchMode):
    """Torch's module of a device, and what operations, futures and memory do there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[tuple[str, ...]] = []
        self.races: list[str] = []
        self.backward = self.current = Queue(self, "backward")
        self._blocks: dict[int, Block] = {}
        self._freed: list[Block] = []
        self._numbers = itertools.count()

    # Torch's module of an accelerator

    Event = Event

    def Stream(self, device: torch.device, priority: int = 0) -> Queue:  # noqa: N802 - torch's name
        return Queue(self, f"side {next(self._numbers)}")

    def current_stream(self, device: torch.device) -> Queue:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record_use(self, tensor: torch.Tensor, stream: Queue) -> None:
        self._block(tensor).recorded[stream.name] = stream

    # Operations and memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = set(self._blocks)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        written = {
            id(value)
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self._collect()
        if any(one.untyped_storage()._cdata not in known for one in made):
            self._reuse()
        if not func.is_view:  # a view touches no memory
            for tensor in given:
                self.access(tensor, id(tensor) in written, str(func))
            for tensor in made:
                self.access(tensor, True, str(func))
        return result

    def access(self, tensor: torch.Tensor, writes: bool, what: str, stream: Queue | None = None) -> None:
        """Put an access on a stream, and check it against those of other streams."""
        on, block = stream or self.current, self._block(tensor)
        on.clock[on.name] += 1
        start = int(tensor.storage_offset()) * tensor.element_size()
        reach = [(int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
        end = start + (sum(reach) + 1) * tensor.element_size() if tensor.numel() else start
        use = Use(on.name, on.clock[on.name], start, end, writes, what)
        for other in block.uses:
            overlaps = other.start < use.end and use.start < other.end and (use.writes or other.writes)
            if overlaps and not on.comes_after(other):
                self.races.append(f"{use} is not ordered after {other}")
        block.uses.append(use)

    def _block(self, tensor: torch.Tensor) -> Block:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = Block(self.current.name, StorageWeakRef(storage))
        return self._blocks[storage._cdata]

    def _collect(self) -> None:
        for key, block in list(self._blocks.items()):
            if block.alive.expired():
                self._freed.append(self._blocks.pop(key))
                for stream in block.recorded.values():
                    for name, time in stream.clock.items():
                        block.done[name] = max(time, block.done.get(name, 0))

    def _reuse(self) -> None:
        """Give the memory that was freed on the current stream to the tensor that it allocates."""
        for block in [one for one in self._freed if one.stream == self.current.name]:
            self._freed.remove(block)
            for use in block.uses:
                kept = use.stream == block.stream or block.done.get(use.stream, 0) >= use.time
                if not kept and not self.current.comes_after(use):
                    self.races.append(f"memory was freed on {block.stream} and reused during {use}")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let thinwire work on this device, with CPU tensors."""
        patch.setattr("thinwire.engine.streams.streams_of", lambda device: self)
        patch.setattr("thinwire.engine.streams.record_use", self.record_use)
        for user in ("thinwire.engine.engine", "thinwire.step.buckets"):
            patch.setattr(f"{user}.Result", lambda device, awaited=None: Future(self))


class Future:
    """A future as torch's are with devices: waits and callbacks are ordered after its completion."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._value: Any = None
        self._clock: Clock | None = None
        self._callbacks: list[Callable[[Any], Any]] = []

    def set_result(self, value: Any) -> None:
        assert self._clock is None, "completed twice"
        self._value, self._clock = value, dict(self.model.current.clock)
        for callback in self._callbacks:
            self._call(callback)

    def fail(self, error: BaseException) -> None:
        raise error

    def depend_on(self, other: "Future") -> None: ...

    def done(self) -> bool:
        return self._clock is not None

    def value(self) -> Any:
        return self._value

    def wait(self) -> Any:
        assert self._clock is not None, "it would wait forever"
        self.model.current.wait_clock(self._clock)
        self.model.record_use(self._value, self.model.current)
        return self._value

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        if self._clock is None:
            self._callbacks.append(callback)
        else:
            self._call(callback)

    def then(self, callback: Callable[[Any], Any]) -> "Future":
        result = Future(self.model)
        self.add_done_callback(lambda done: result.set_result(callback(done)))
        return result

    def _call(self, callback: Callable[[Any], Any]) -> None:
        assert self._clock is not None
        own = Queue(self.model, f"pool {next(self.model._numbers)}")  # torch takes one of its pool
        own.wait_clock(self._clock)
        self.model.record_use(self._value, own)
        with self.model.stream(own):
            callback(self)


class Network:
    """A communicator whose collectives run on a stream of its own, as NCCL's do."""

    rank, size = 0, 2

    def __init__(self, model: Model, limit: Any) -> None:
        self.model, self.limit = model, limit
        self.own = Queue(model, "network")

    def in_any_order(self, op: Any) -> bool:
        return False

    def issue(self, op: Any, turn: Any = None) -> "InFlight":
        self.model.log.append(("issue", self.model.current.name))
        return InFlight(self, op)

    def connect_subgroups(self, groups: Any) -> None: ...

    def close(self) -> None: ...


class InFlight:
    """A collective. It holds its tensors until it was waited for, as torch's works do."""

    def __init__(self, network: Network, op: Any) -> None:
        self.network, self.sent = network, op.tensor
        # Of an all-to-all no rank fills the row that it would send to itself, so the peer's are zeros.
        sent = torch.zeros_like(op.tensor) if isinstance(op, AllToAll) else op.tensor
        self.received = deliver(op, [sent] * network.size)[network.rank]
        network.own.wait_stream(network.model.current)
        for tensor in (self.sent, self.received):
            network.model.access(tensor, tensor is self.received, str(op), network.own)

    def done(self) -> bool:
        return False  # the host never knows: streams order it

    def wait(self) -> torch.Tensor:
        model = self.network.model
        model.current.wait_stream(self.network.own)
        model.log.append(("order", model.current.name))
        return self.received
