"""Runs a function on several real Gloo ranks and returns the result of each.

Ranks are processes forked from a server that has torch loaded already. They are kept warm: a process runs one
function after another, each in a new process group over a new store, until a function fails or leaves
something behind (tests/rank_process.py compares). The parent hosts the store, as torchrun's agent does, so
that it outlives any rank; or rank 0 does, as without torchrun, so that it freezes and dies with that rank.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import wait
from typing import Any

import pytest

from tests import rank_process
from tests.rank_process import Job
from tests.shadow import device
from tests.shadow.device import SHADOW

# On some virtual machines AMX, which oneDNN takes for bf16, is an illegal instruction in a forked process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
_context = multiprocessing.get_context("forkserver")
# DDP imports dynamo when the first model is wrapped, and torch compiles its optimizers when they are
# imported: each takes longer than most tests.
_PRELOADED = ["torch._dynamo", "torch.distributed.optim", "thinwire", "tests.rank_process"]
_context.set_forkserver_preload(_PRELOADED)

SECONDS = 600
"""The default limit of a function on ranks: far more than any takes, so that a busy machine fails no test."""
_ENDING_SECONDS = 60


def preload(*modules: str) -> None:
    """Start ranks with further modules loaded, those that are installed, unless one was started before."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


class _Rank:
    """One process that runs jobs."""

    def __init__(self) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=rank_process.serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()

    def end(self) -> int | None:
        """Wait for the process to end, and return its exit code; None if it does not end."""
        self.process.join(_ENDING_SECONDS)
        code = self.process.exitcode
        self.kill()
        return code


_warm: dict[tuple[str, int], _Rank] = {}
"""The processes between two jobs, by the backend and the rank that each always has."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    seconds: float = SECONDS,
    group_timeout: float = 180,
    dies: Collection[int] = (),
    rank_0_hosts: bool = False,
    fresh: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank; the results by rank.

    Fails the test if a rank raises, dies or stops (unless it is in `dies`) or takes longer than `seconds`.

    Args:
        function: A function of a module.
        world_size: The number of ranks.
        args: Further arguments, the same on every rank.
        seconds: The limit for all ranks together.
        group_timeout: The timeout of the process group, in seconds.
        dies: The ranks that may be killed or stopped. They get new processes.
        rank_0_hosts: Whether the store is on rank 0. It gets new processes.
        fresh: Whether to use new processes that end after the function, for a function that changes more of
            its process than tests/rank_process.py compares, or depends on what happens once in a process.
        backend: The backend of the process group. With `tests.shadow.device.SHADOW` ranks have the shadow
            device, and the test is skipped where that cannot be compiled.

    Returns:
        The results by rank, None for a rank that died.
    """
    alone = fresh or bool(dies) or rank_0_hosts
    if backend == SHADOW:
        _build_shadow()
    ranks: list[_Rank] = []
    deadline = time.monotonic() + seconds
    store = None if rank_0_hosts else rank_process.host()
    port = 0 if store is None else store.port
    try:
        for rank in range(world_size):
            warm = (backend, rank)
            ranks.append(_Rank() if alone or warm not in _warm else _warm.pop(warm))
            job = Job(function, rank, world_size, port, group_timeout, args, alone, backend)
            ranks[rank].pipe.send_bytes(pickle.dumps(job))
            if port == 0:
                assert ranks[0].pipe.poll(seconds), "rank 0 hosts no store"
                port = pickle.loads(ranks[0].pipe.recv_bytes())
        return _collect(ranks, deadline, set(dies), backend)
    except BaseException:
        end_warm_ranks(kill=True)  # one failure must not spread to the tests after it
        raise
    finally:
        for process in ranks:
            if process not in _warm.values():
                process.kill()


def warm_processes() -> list[Any]:
    """Return the processes that outlive a test."""
    return [rank.process for rank in _warm.values()]


def end_warm_ranks(*, kill: bool = False) -> None:
    """End the processes between two jobs, and check that each can."""
    ending = list(_warm.values())
    _warm.clear()
    for rank in ending:
        if kill:
            rank.kill()
        else:
            rank.pipe.send_bytes(pickle.dumps(None))
    codes = [] if kill else [rank.end() for rank in ending]
    assert all(code == 0 for code in codes), f"ranks ended with exit codes {codes} after their last test"


atexit.register(end_warm_ranks)  # before multiprocessing's own handler, which waits for them


def _collect(ranks: list[_Rank], deadline: float, dies: set[int], backend: str) -> list[Any]:
    results: dict[int, Any] = {}
    stays: dict[int, bool] = {}

    def receive(rank: int) -> None:
        try:
            fine, stays[rank], result = pickle.loads(ranks[rank].pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            ranks[rank].process.join()
            code = ranks[rank].process.exitcode
            assert rank in dies, f"rank {rank} died with exit code {code}"
            fine, result = True, None
        assert fine, f"rank {rank} raised:\n{result}"
        results[rank] = result

    # The first rank that fails fails the test: the others may wait for it as long as the group does.
    survivors = set(range(len(ranks))) - dies or dies
    while waiting := {ranks[rank].pipe: rank for rank in survivors - set(results)}:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} hang"
        for pipe in ready:
            receive(waiting[pipe])  # type: ignore[index]
    for rank in dies - survivors:
        if not ranks[rank].pipe.poll():
            ranks[rank].process.kill()  # it has stopped instead
        receive(rank)
    for rank, process in enumerate(ranks):
        if stays.get(rank):
            _warm[backend, rank] = process
        elif rank not in dies:
            process.process.join(_ENDING_SECONDS)
            code = process.process.exitcode
            assert code == 0, f"rank {rank} ended with exit code {code} after its work"
    return [results[rank] for rank in range(len(ranks))]


def _build_shadow() -> None:
    """Compile the shadow device before a rank needs it; skip the test where that is impossible."""
    if reason := device.unavailable():
        pytest.skip(reason)
    device.library()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """DCP warns of what is not in our hands, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
