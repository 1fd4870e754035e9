"""What a rank's process does: jobs one after another, as long as each leaves the process as it found it."""

import ctypes
import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.shadow import device
from thinwire.engine.comm.process_group import _backend_holders

_WATCHED = (
    "thinwire",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.amp",
    "torch._dynamo.convert_frame",  # counts what was compiled
)
"""The modules, with those below them, that a job must leave as they were."""
_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True)
class Job:
    """One function on one rank."""

    function: Callable[..., Any]
    rank: int
    world_size: int
    port: int
    group_timeout: float
    args: tuple[Any, ...]
    last: bool
    backend: str


def host() -> dist.TCPStore:
    """Host a store on a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def serve(pipe: Connection) -> None:
    """Run the jobs that come through the pipe, and send (succeeded, stays for another, result) after each."""
    # The fork server ends with the test process, however that ends, and so does this one.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    gc.freeze()  # what torch's modules hold is never garbage; looking at it takes 150 ms each time
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "LBFGS"):
        getattr(torch.optim, name)([torch.zeros(1)])  # torch wraps a class's step when the first one is made
    before, environment, excepthook = _state(), dict(os.environ), sys.excepthook
    stays = True
    while stays:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception:  # what the function's module raises when it is imported
            pipe.send_bytes(pickle.dumps((False, False, traceback.format_exc())))
            return
        if job is None:
            return
        warnings.resetwarnings()
        warnings.simplefilter("error")
        torch.manual_seed(0)
        random.seed()
        fine, result = _run(job, pipe)
        last = job.last
        del job  # with its arguments
        gc.collect()
        os.environ.clear()
        os.environ.update(environment)
        sys.excepthook = excepthook  # init_process_group wraps it, each time
        stays = fine and not last and not _changes(before)
        pipe.send_bytes(_pickled(fine, stays, result))


_held: list[dist.ProcessGroup] = []
"""The group of the latest job."""


def _run(job: Job, pipe: Connection) -> tuple[bool, Any]:
    world: dist.ProcessGroup | None = None
    holders: list[object] = []
    try:
        if job.port == 0:
            store = host()
            pipe.send_bytes(pickle.dumps(store.port))
        else:
            store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
        limit = timedelta(seconds=job.group_timeout)
        if "shadow" in job.backend:
            device.reset()
        dist.init_process_group(
            job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit
        )
        # Held by this thread until the next job: torch's hooks drop references on Gloo's own, maybe a moment
        # after the job, and a group freed there waits for itself ("Resource deadlock avoided").
        world = dist.group.WORLD
        assert world is not None
        _held[:] = [world]
        holders = _backend_holders(world)  # torch 2.6 may not end the process otherwise
        result = job.function(job.rank, job.world_size, *job.args)
        gc.collect()
        assert _wire_threads_end(), "a wire thread outlived its model"
        dist.destroy_process_group()
    except BaseException:
        return False, traceback.format_exc()
    del holders
    return True, result


def _pickled(fine: bool, stays: bool, result: Any) -> bytes:
    # Not pipe.send: its pickler is torch's, which leaves tensors in memory that ends with this process.
    try:
        return pickle.dumps((fine, stays, result))
    except Exception:
        return pickle.dumps((False, False, traceback.format_exc()))


def _wire_threads_end(seconds: float = 150) -> bool:
    """Whether no thread of thinwire is left; one that closes connections after a failure may take its limit.

    One that asks a store on a frozen host waits as long as that is frozen.
    """
    deadline = time.monotonic() + seconds
    while any("thinwire" in thread.name and "store" not in thread.name for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        gc.collect()  # autograd's thread of a device drops the last graph, and with it a model, later
    return True


def _changes(before: dict[Any, Any]) -> list[Any]:
    """Return what differs from an earlier state of the process."""
    now = _state()
    changes = [key for key, value in before.items() if key in now and not _same(now[key], value)]
    # torch takes a mesh that it has kept for an equal one of the next job, and finds none of its groups.
    return changes + [held for held in gc.get_objects() if type(held) is DeviceMesh]


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, str | int | tuple) and one == other)


def _state() -> dict[Any, Any]:
    """Return everything that is global in a process and that tests change, by name."""
    state: dict[Any, Any] = {
        "threads": tuple(threading.enumerate()),
        "folder": os.getcwd(),
        "signals": tuple(signal.getsignal(number) for number in signal.valid_signals()),
        "streams": (sys.stdout, sys.stderr),
        "path": tuple(sys.path),
        "torch": (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device(),
        ),
    }
    for name, logger in [("", logging.root), *sorted(logging.root.manager.loggerDict.items())]:
        if isinstance(logger, logging.Logger) and (not name or name.startswith("thinwire")):
            state["log", name] = (logger.level, logger.propagate, logger.disabled, *logger.handlers)
    for owner in _watched_owners():
        for name, value in vars(owner).items():
            if not name.startswith("__") and name != "_backend":  # c10d's, set by every init_process_group
                state[owner, name] = value
    state.update({(torch.Tensor, name): value for name, value in vars(torch.Tensor).items()})
    return state


def _watched_owners() -> Iterator[ModuleType | type]:
    """Yield the watched modules, and the classes that are defined in them."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.startswith(_WATCHED):
            yield module
            for value in list(vars(module).values()):
                if issubclass(type(value), type) and value.__module__ == name:
                    yield value
