"""Checks of a running job: groups, order on streams, host reads, faults."""

import contextlib
import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.programs.program import ProgramFunction
from thinwire.tools.doctor.check import OK, SKIPPED, Outcome, Surroundings, judged
from thinwire.tools.doctor.values import NOT_BITWISE, PROGRAMS, SUMMED

_STEPS = 4
_LEARNING_RATE = 2.0**-4
"""A power of two, whose products are exact. SGD adds them with `alpha`, which GPUs round once, CPUs twice."""
_SHAPES = ((128, 64), (128,), (96, 128), (7, 33), (8, 96), (8,))


class GivenGradients(torch.nn.Module):
    """A model whose gradients are the given numbers, with the same bits on every device."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in _SHAPES
        )

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return a loss whose gradients are the given ones."""
        products = [(weight * given).sum() for weight, given in zip(self.weights, gradients, strict=True)]
        return torch.stack(products).sum()


def _batch(rank: int, step: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)
        for shape in _SHAPES
    ]


def groups(around: Surroundings) -> Outcome:
    """Connect with and without `device_id`, run collectives on a subgroup, close on one rank first."""
    details: dict[str, Any] = {}
    for bound in (False, True):
        started = time.perf_counter()
        with around.group(bound=bound):
            _among_some(around)
            dist.barrier()
        details["with device_id" if bound else "without device_id"] = round(time.perf_counter() - started, 2)
    spent = " and ".join(f"{what} in {seconds:.1f} s" for what, seconds in details.items())
    members = len(_members(around.world_size))
    return Outcome(OK, f"a subgroup of {members} ranks ran {spent}; rank 0 closed first", details)


def _among_some(around: Surroundings) -> None:
    """Average on a subgroup. Rank 0 closes first."""
    ddp = DistributedDataParallel(GivenGradients().to(around.device), broadcast_buffers=False)
    thinwire.attach(ddp, _mean_of_some, timeout=around.limit)
    ddp(_batch(0, 0, around.device)).backward()
    ddp.module.weights[0].grad.sum().item()
    if around.rank == 0:
        del ddp
        gc.collect()  # the model is in a cycle; with it go its connections
    dist.barrier()


def _members(world_size: int) -> tuple[int, ...]:
    """Return the ranks of the subgroup: all but the last. Two ranks are both in it, as one makes no group."""
    # The last rank makes no group of its own at the same time. Had all ranks made one, NCCL could have split
    # the default group's communicator, which waits for all of its ranks, and the check would not see it.
    return tuple(range(max(2, world_size - 1)))


def _mean_of_some(bucket: thinwire.Bucket, memory: thinwire.Memory) -> thinwire.Collectives[thinwire.Outcome]:
    ranks = _members(bucket.world_size)
    if bucket.rank not in ranks:
        return thinwire.Outcome(bucket.buffer)
    total = yield thinwire.AllReduce(bucket.buffer, ranks=ranks)
    return thinwire.Outcome(total / len(ranks))


def streams(around: Surroundings) -> Outcome:
    """Train with every program on the device and on the CPU. Compare replicas, values and races."""
    wrong: list[str] = []
    rows = list(_set_ups())
    with around.group(), _sanitizer(around) as races:
        for name, options, program in rows:
            label = name + (f" with {', '.join(options)}" if options else "")
            found = _trained(around, around.device, program(), options)
            if len({tuple(peer) for peer in around.agree(found)}) > 1:
                wrong.append(f"{label}: ranks hold different parameters")
            on_cpu = _trained(around, torch.device("cpu"), program(), options)
            if found != on_cpu and _bitwise(name, options, around.world_size):
                wrong.append(f"{label}: other parameters than on the CPU")
            if count := races():
                wrong.append(f"{label}: {count} races")
    return judged(wrong, f"{len(rows)} set-ups: no race found, ranks equal, parameters as on the CPU")


def _bitwise(name: str, options: dict[str, Any], world_size: int) -> bool:
    """Return whether a set-up has the CPU's bits. Backends add up more than two numbers in any order."""
    sums = name in SUMMED or "rules" in options  # one of the rules is for Exact
    return name not in NOT_BITWISE and not (sums and world_size > 2)


def _set_ups() -> Iterator[tuple[str, dict[str, Any], Callable[[], thinwire.Program]]]:
    for name, make in PROGRAMS.items():
        yield name, {}, make
    yield "Int8", {"find_unused_parameters": True}, thinwire.Int8
    yield "Int8", {"static_graph": True}, thinwire.Int8
    yield "Int8", {"gradient_as_bucket_view": True}, thinwire.Int8
    yield "Int8", {"rules": [("weights.2", thinwire.BF16()), ("weights.4", thinwire.Exact())]}, thinwire.Int8


def _trained(
    around: Surroundings, device: torch.device, program: thinwire.Program, options: dict[str, Any]
) -> list[int]:
    """Return checksums of the parameters after a few steps."""
    given = dict(options)
    rules = given.pop("rules", ())
    ddp = DistributedDataParallel(GivenGradients().to(device), bucket_cap_mb=0.03, **given)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=_LEARNING_RATE, foreach=False)
    thinwire.attach(ddp, program, rules=rules, timeout=around.limit)
    for step in range(_STEPS):
        optimizer.zero_grad()
        ddp(_batch(around.rank, step, device)).backward()
        optimizer.step()
    weights = [parameter.detach().cpu().view(torch.int32) for parameter in ddp.parameters()]
    del ddp, optimizer
    gc.collect()  # the model is in a cycle; every rank closes its wire here, so that none waits for another
    return [int(weight.to(torch.int64).sum()) for weight in weights]


@contextlib.contextmanager
def _sanitizer(around: Surroundings) -> Iterator[Callable[[], int]]:
    """Open torch's race finder, if any. Yield a function that counts the races since its last call."""
    counted = getattr(around.module, "races", None)  # a device that finds races itself, since its last call
    if around.device.type == "cuda":
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()  # raises in the operation that races
    yield counted if callable(counted) else lambda: 0


def host_reads(around: Surroundings) -> Outcome:
    """Count how often the host waits for the device during backward. One read per step is allowed."""
    waits = _waits(around)
    if waits is None:
        return Outcome(SKIPPED, f"{around.device.type} cannot count how often the host waits")
    wrong, details = [], {}
    with around.group():
        for name, make in PROGRAMS.items():
            ddp = DistributedDataParallel(GivenGradients().to(around.device), bucket_cap_mb=0.03)
            thinwire.attach(ddp, make(), timeout=around.limit)
            for step in range(_STEPS):
                loss = ddp(_batch(around.rank, step, around.device))
                with waits() as counted:
                    loss.backward()
            details[name] = counted[0]
            del ddp, loss
            gc.collect()  # on every rank at the same time, as in `_trained`
            if counted[0] > 1:
                wrong.append(f"{name}: the host waits {counted[0]} times in one backward")
    return judged(wrong, "at most one wait of the host per backward", details)


def _waits(around: Surroundings) -> Callable[[], contextlib.AbstractContextManager[list[int]]] | None:
    """Return a context that counts the host's waits in its list's first number, or None without a way."""
    module = around.module

    @contextlib.contextmanager
    def by_the_device() -> Iterator[list[int]]:
        counted, before = [0], module.host_waits()
        yield counted
        counted[0] = module.host_waits() - before

    @contextlib.contextmanager
    def by_warnings() -> Iterator[list[int]]:
        counted = [0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.set_sync_debug_mode("warn")
            try:
                yield counted
            finally:
                module.set_sync_debug_mode("default")
        counted[0] = sum("synchroniz" in str(warning.message) for warning in caught)

    if hasattr(module, "host_waits"):
        return by_the_device
    return by_warnings if hasattr(module, "set_sync_debug_mode") else None


def overflow(around: Surroundings) -> Outcome:
    """Make a gradient infinite on one rank. All ranks must skip the step and stay equal."""
    with around.group():
        ddp = DistributedDataParallel(GivenGradients().to(around.device), bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, foreach=False)
        wire = thinwire.attach(ddp, thinwire.Int8(), optimizer=optimizer, timeout=around.limit)
        for step in range(3):
            batch = _batch(around.rank, step, around.device)
            if step == 1 and around.rank == around.world_size - 1:
                batch[0][0, 0] = float("inf")
            optimizer.zero_grad()
            ddp(batch).backward()
            optimizer.step()
        finite = all(bool(parameter.isfinite().all()) for parameter in ddp.parameters())
        seen = wire.stats().overflows
        wrong = [] if finite else ["parameters are not finite after a skipped step"]
        wrong += [] if seen == 1 else [f"{seen} overflows were counted, not 1"]
    return judged(wrong, "an overflow on one rank was skipped on all")


def failing_program(around: Surroundings) -> Outcome:
    """Raise in a program on one rank. Every rank must raise an error of thinwire within the limit."""

    def program(bucket: thinwire.Bucket, memory: thinwire.Memory) -> thinwire.Collectives[thinwire.Outcome]:
        if bucket.rank == bucket.world_size - 1:
            raise ArithmeticError("planted by thinwire doctor")
        total = yield thinwire.AllReduce(bucket.buffer)
        return thinwire.Outcome(total)

    with around.group():
        return _expected_error(around, program)


def lost_rank(around: Surroundings) -> Outcome:
    """Kill one rank during backward. The others must raise an error that names it, within the limit."""
    last = around.world_size - 1

    def program(bucket: thinwire.Bucket, memory: thinwire.Memory) -> thinwire.Collectives[thinwire.Outcome]:
        if bucket.rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        total = yield thinwire.AllReduce(bucket.buffer)
        return thinwire.Outcome(total)

    group = around.group()
    group.__enter__()  # not left: destroying it could wait for the lost rank
    found = _expected_error(around, program)
    if found.verdict == OK and f"ank {last}" not in found.details["error"]:
        return judged(
            [f"the error does not name rank {last}: {found.details['error'][:200]}"], "", found.details
        )
    return found


def _expected_error(around: Surroundings, program: ProgramFunction) -> Outcome:
    limit = 10.0
    ddp = DistributedDataParallel(GivenGradients().to(around.device))
    thinwire.attach(ddp, program, timeout=limit)
    started = time.perf_counter()
    try:
        ddp(_batch(around.rank, 0, around.device)).backward()
        ddp.module.weights[0].grad.sum().item()
    except thinwire.ThinwireError as error:
        spent = time.perf_counter() - started
        text = f"{type(error).__name__} after {spent:.1f} s"
        return Outcome(OK, text, {"error": str(error), "seconds": round(spent, 2)})
    except Exception as error:  # an error that is not thinwire's is this check's finding
        return judged(
            [f"raised {type(error).__name__} instead of an error of thinwire: {str(error)[:200]}"], ""
        )
    return judged(["no error was raised"], "")
