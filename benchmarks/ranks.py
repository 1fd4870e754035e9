"""Ranks of a benchmark on this machine, connected over loopback."""

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Call `function(rank, world_size, *args)` on every rank with one thread. Return rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_main, (function, world_size, folder, args), nprocs=world_size)
        return pickle.loads((Path(folder) / "result").read_bytes())


def _main(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting_point = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world_size)
    result = function(rank, world_size, *args)
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
