"""Tests of any DDP communication hook on real ranks."""

import math
import multiprocessing
import os
import pickle
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import OptionError

_WIDTH = 32


@dataclass(frozen=True)
class HookReport:
    """The result of `check_hook`.

    Attributes:
        errors: The distance of the gradients from the exact mean in each step, relative to its norm.
    """

    errors: tuple[float, ...]


def check_hook(
    register: Callable[[DistributedDataParallel], Any],
    *,
    ranks: int = 2,
    steps: int = 6,
    tolerance: float = 0.02,
    seconds: float = 60,
) -> HookReport:
    """Check a communication hook on real Gloo ranks, with many buckets and random delays.

    After each backward all ranks must hold bit-identical gradients within `tolerance` of the exact mean.

    Args:
        register: Registers the hook on a DDP model. It must be a function of a module, because other
            processes import it.
        ranks: The number of processes to start.
        steps: The number of backward passes.
        tolerance: The largest distance from the exact mean, relative to its norm.
        seconds: The time after which ranks are considered to hang.

    Returns:
        The measured errors.

    Raises:
        AssertionError: The hook fails. The message says how.
        OptionError: An argument has a wrong value.

    Example::

        def register(ddp):
            ddp.register_comm_hook(None, my_hook)

        if __name__ == "__main__":
            print(thinwire.testing.check_hook(register))
    """
    for name, value in (("ranks", ranks), ("steps", steps)):
        if value < 1:
            raise OptionError(f"{name}={value!r} must be at least 1: nothing would be checked")
    try:
        pickle.dumps(register)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"register={register!r} cannot be sent to other processes ({error}): define it with def at the"
            " top level of a module"
        ) from error
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_train,
                args=(register, rank, ranks, steps, str(Path(folder, "store")), seconds, sender),
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = _collect(pipes, seconds)
        finally:
            for started in processes:
                started.kill()
                started.join()
    return _judge(results, tolerance)


def _collect(pipes: list[Connection], seconds: float) -> list[Any]:
    """Return the results of every rank, or raise the error of the rank that fails first."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(results) < len(pipes):
        silent = {id(pipe): rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait([pipes[rank] for rank in silent.values()], max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {list(silent.values())} hang after {seconds:g} s"
        for pipe in ready:
            rank = silent[id(pipe)]
            try:
                results[rank] = pipes[rank].recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died: the hook aborted the process") from None
            assert not isinstance(results[rank], str), f"rank {rank} raised:\n{results[rank]}"
    return [results[rank] for rank in range(len(pipes))]


def _judge(results: list[Any], tolerance: float) -> HookReport:
    errors = []
    for step, by_rank in enumerate(zip(*results, strict=True)):
        received = [torch.as_tensor(gradients) for gradients, _ in by_rank]
        for rank, gradients in enumerate(received):
            assert torch.equal(gradients, received[0]), (
                f"step {step}: ranks 0 and {rank} hold different gradients"
            )
        exact = torch.stack([torch.as_tensor(own) for _, own in by_rank]).double().mean(0)
        errors.append(float((received[0] - exact).norm() / exact.norm()))
        assert math.isfinite(errors[-1]), f"step {step}: the gradients are non-finite"
        assert errors[-1] <= tolerance, (
            f"step {step}: the gradients are off by {errors[-1]:.2%} of the exact mean, more than the"
            f" {tolerance:.2%} allowed"
        )
    return HookReport(tuple(errors))


def _train(
    register: Callable[[DistributedDataParallel], Any],
    rank: int,
    ranks: int,
    steps: int,
    store: str,
    seconds: float,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
        )
        pipe.send(_gradients(register, rank, steps))
        dist.destroy_process_group()
    except BaseException:
        pipe.send(traceback.format_exc())


def _gradients(register: Callable[[DistributedDataParallel], Any], rank: int, steps: int) -> list[Any]:
    """Return, for each step, the averaged gradients and this rank's own ones, as lists of numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(module for _ in range(6) for module in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    chance = random.Random(rank)
    for parameter in model.parameters():
        # Random delays in backward, different on each rank: buckets arrive in different orders, as on a busy
        # machine.
        parameter.register_hook(lambda _: time.sleep(chance.uniform(0, 0.002)))
    register(ddp)
    results = []
    for step in range(steps):
        batch = torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        own = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
        model.zero_grad()
        ddp(batch).square().mean().backward()
        averaged = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append((_flat(averaged), _flat(own)))
    return results


def _flat(tensors: Any) -> Any:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()
