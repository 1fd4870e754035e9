"""Streams of an accelerator: order between them, and memory that more than one of them uses.

torch gives a freed tensor's memory to the next tensor of the stream that allocated it. If another stream
still uses it, that stream must be recorded, or the allocating stream must wait for it before the tensor is
freed. On the CPU everything here is a no-op. `tests/shadow/test_sabotage.py` removes each precaution, and
a device that finds races reports it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from thinwire.errors import UnavailableError

_HIGH = -1
"""torch's high priority of streams. Priorities are numbers of which lower ones come first."""


def streams_of(device: torch.device) -> Any | None:
    """Return torch's module of an accelerator, with its streams; None for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def require_streams(device: torch.device) -> None:
    """Raise UnavailableError if a device is no CPU and torch has no streams for it."""
    streams = streams_of(device)
    if streams is not None and not hasattr(streams, "Stream"):
        raise UnavailableError(
            f"the model is on {device}, and torch.{device.type} has no streams, on which thinwire exchanges"
            " gradients while backward runs: move the model to the CPU, or to a CUDA, ROCm or XPU device"
        )


def record_use(tensor: torch.Tensor, stream: Any) -> None:
    """Keep a freed tensor's memory from being reused before a stream's present work is done."""
    tensor.record_stream(stream)


class SideStream:
    """The engine's own stream, on which programs run in parallel with backward's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        # Programs launch short kernels, and the network waits for them. At backward's priority they would
        # wait for its long ones.
        self._stream: Any = None if self._streams is None else self._streams.Stream(device, priority=_HIGH)

    @property
    def separate(self) -> bool:
        """True if the device has streams, so that memory may be reused while this stream still uses it."""
        return self._stream is not None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block on this stream. It does not wait for the current one, see `after`."""
        if self._streams is None:
            yield
            return
        with self._streams.stream(self._stream):
            yield

    def mark(self) -> Any | None:
        """Return an event that the current stream reaches after the work queued on it so far."""
        if self._streams is None:
            return None
        event = self._streams.Event()
        event.record(self._streams.current_stream(self.device))
        return event

    def after(self, event: Any | None) -> None:
        """Make this stream wait for an event of another one."""
        if event is not None:
            self._stream.wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor for programs, which may outlive the last reference to it."""
        if self._stream is not None:
            record_use(tensor, self._stream)

    def join(self) -> None:
        """Make the current stream wait for this one."""
        if self._streams is not None:
            self._streams.current_stream(self.device).wait_stream(self._stream)


class Writers:
    """The streams that write to one buffer, each a part of it.

    A future's callback runs on a stream of its own. The future of the whole buffer, which is completed on the
    stream of its last part, must come after all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = streams_of(device)
        self._writing: set[Any] = set()

    def note(self) -> None:
        """Record that the current stream has written a part."""
        if self._streams is not None:
            self._writing.add(self._streams.current_stream(self._device))

    def join(self) -> None:
        """Make the current stream wait for all streams that have written a part."""
        if self._streams is not None:
            current = self._streams.current_stream(self._device)
            # The last part's callback completes the whole buffer's future. Without these waits its reader
            # would be ordered after the last part alone, and could read parts that are still being written.
            for stream in self._writing - {current}:
                current.wait_stream(stream)
            self._writing.clear()
