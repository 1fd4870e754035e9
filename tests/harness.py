"""Runs a function on several real Gloo ranks and brings back what each returned.

Ranks are processes forked from a server that has torch loaded already, so a test costs a fraction of a
second. The parent hosts the store, as torchrun's agent does, so the store outlives any rank; or rank 0 does,
as without torchrun, so that it freezes and dies with that rank.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.engine.comm.process_group import _backend_holders

# On some virtual machines AMX, which oneDNN takes for bf16, is an illegal instruction in a forked process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
_context = multiprocessing.get_context("forkserver")
# DDP imports dynamo when the first model is wrapped, and torch compiles its optimizers when they are
# imported: each takes longer than most tests.
_PRELOADED = ["torch._dynamo", "torch.distributed.optim", "thinwire", "tests.harness"]
_context.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Start ranks with further modules loaded, those that are installed, unless one was started before."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    seconds: float = 60,
    group_timeout: float = 30,
    dies: Collection[int] = (),
    rank_0_hosts: bool = False,
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank; the results by rank.

    Fails the test if a rank raises, dies or stops (unless it is in `dies`) or takes longer than `seconds`.
    """
    deadline = time.monotonic() + seconds
    store = None if rank_0_hosts else _host()
    port = 0 if store is None else store.port
    pipes: list[Any] = []
    processes: list[Any] = []
    try:
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main, args=(function, rank, world_size, port, group_timeout, sender, args)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
            if port == 0:
                assert receiver.poll(seconds), "rank 0 hosts no store"
                port = pickle.loads(receiver.recv_bytes())
        return _collect(pipes, processes, deadline, set(dies))
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _host() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _collect(pipes: list[Any], processes: list[Any], deadline: float, dies: set[int]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    for rank in sorted(range(len(pipes)), key=lambda rank: (rank in dies, rank)):
        pipe = pipes[rank]
        ended = rank in dies and len(dies) < len(pipes)  # a rank that dies alone is waited for
        if not pipe.poll(0.0 if ended else max(0.0, deadline - time.monotonic())):
            assert rank in dies, f"rank {rank} hangs"
            processes[rank].kill()  # it has stopped instead
        try:
            fine, result = pickle.loads(pipe.recv_bytes())
        except EOFError:
            processes[rank].join()
            assert rank in dies, f"rank {rank} died with exit code {processes[rank].exitcode}"
            continue
        assert fine, f"rank {rank} raised:\n{result}"
        results[rank] = result
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        code = process.exitcode
        assert code == 0 or rank in dies, f"rank {rank} ended with exit code {code} after its work"
    return results


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    group_timeout: float,
    pipe: Any,
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world: dist.ProcessGroup | None = None
    holders: list[object] = []
    try:
        if port == 0:
            store = _host()
            pipe.send_bytes(pickle.dumps(store.port))
        else:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
        limit = timedelta(seconds=group_timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        # Held to the end by this thread: torch's hooks drop references on Gloo's own, and a group freed
        # there waits for itself ("Resource deadlock avoided").
        world = dist.group.WORLD
        assert world is not None
        holders = _backend_holders(world)  # torch 2.6 may not end the process otherwise
        result = function(rank, world_size, *args)
        gc.collect()
        assert _wire_threads_end(), "a wire thread outlived its model"
        dist.destroy_process_group()
        message = (True, result)
    except BaseException:
        message = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    del world
    del holders


def _wire_threads_end(seconds: float = 5) -> bool:
    """Whether no thread of ours is left; one that hangs up after a failure may take a moment.

    One that asks a store on a frozen host waits as long as that is frozen.
    """
    deadline = time.monotonic() + seconds
    while any("thinwire" in name and "store" not in name for name in _thread_names()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]
