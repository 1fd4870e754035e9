"""A watch for failures elsewhere, for a rank that waits in FSDP's own collectives.

    rank 3      evaluates alone: its gathers meet those of rank 2's training, and both wait for each other
    ranks 0, 1  wait for their exchanges with ranks 2 and 3, time out, raise, and report it in the store
    ranks 2, 3  wait in FSDP, not in thinwire: without the watch, up to the time limit of FSDP's group

The watch reads the reports. If this rank's own wire has no failure, it shuts the wire down, so that the next
forward raises an error with the cause. Then it closes the connections of the group of shards, so that FSDP's
collectives in flight fail. A rank that raises by itself keeps that group, and can still save its shards.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

from thinwire.engine.comm.messages import cut
from thinwire.engine.comm.process_group import on_gloo
from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.engine.engine import Engine
from thinwire.errors import ThinwireError, WireError

logger = logging.getLogger("thinwire")

_DOWN = "the exchange between replicas is down: "
_POLL_SECONDS = 2.0
"""The time between two requests to the store, of about a hundred bytes."""


def watch(
    engine: Engine, meetings: Sequence[StoreRendezvous], shard_group: dist.ProcessGroup
) -> Callable[[], None]:
    """Start to watch for failures that other ranks report.

    Args:
        engine: The engine of this rank's wire.
        meetings: Where the ranks of other replicas, and of this one, report failures.
        shard_group: The process group of FSDP's own collectives.

    Returns:
        A function that ends the watch.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_serve, args=(engine, meetings, shard_group, ended), name="thinwire watch", daemon=True
    )
    thread.start()

    def end() -> None:
        ended.set()
        if thread is not threading.current_thread():  # the garbage collector may run there
            thread.join(_POLL_SECONDS)

    return end


def _serve(
    engine: Engine,
    meetings: Sequence[StoreRendezvous],
    shard_group: dist.ProcessGroup,
    ended: threading.Event,
) -> None:
    seen = False
    while not ended.wait(_POLL_SECONDS):
        with contextlib.suppress(ThinwireError):  # a store that does not answer is found by the next exchange
            cause = next((text for rendezvous in meetings for text in _reports(rendezvous)), None)
            if engine.failed:
                return
            if cause is not None and seen:
                _shut_down(engine, cause, shard_group)
                return
            seen = cause is not None  # a failure may be on its way to this rank's own wire: wait once more


def _reports(rendezvous: StoreRendezvous) -> list[str]:
    """Return the failures that other ranks have reported, each with its rank."""
    found = rendezvous.reported()
    return [
        f"rank {rendezvous.ranks[rank]} {text}" for rank, text in found.items() if rank != rendezvous.rank
    ]


def _shut_down(engine: Engine, cause: str, shard_group: dist.ProcessGroup) -> None:
    _, again, rest = cause.partition(_DOWN)  # of a rank that has learnt it in the same way
    error = WireError(
        f"{_DOWN}{rest}"
        if again
        else f"{_DOWN}{cause}. The job cannot continue: restart it from its last checkpoint"
    )
    logger.error("%s. FSDP's collectives on this rank are ended", error)
    with contextlib.suppress(ThinwireError):
        engine.fail(error)
    if on_gloo(shard_group):
        cut(shard_group)
