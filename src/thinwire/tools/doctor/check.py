"""A check's surroundings and its outcome."""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

OK, DIFFERS, FAILED, HUNG, SKIPPED = "ok", "DIFFERS", "FAILED", "HUNG", "skipped"
_WORST_FIRST = (HUNG, FAILED, DIFFERS, OK, SKIPPED)


@dataclass(frozen=True)
class Outcome:
    """What one check found.

    Attributes:
        verdict: "ok", "DIFFERS" (ran, with other values than expected), "FAILED" (raised), "HUNG" or
            "skipped".
        text: One line for the table.
        details: All figures, for the JSON file.
    """

    verdict: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as data for JSON."""
        return asdict(self)


def worst(outcomes: list[Outcome]) -> Outcome:
    """Return the first of the outcomes with the worst verdict, which stands for all ranks."""
    return min(outcomes, key=lambda outcome: _WORST_FIRST.index(outcome.verdict))


def judged(wrong: list[str], right: str, details: dict[str, Any] | None = None) -> Outcome:
    """Return an outcome that is "ok" if nothing was found wrong.

    Args:
        wrong: What differs from the expected, one line each.
        right: The line of the table if nothing does.
        details: Figures for the JSON file.
    """
    found = {**(details or {}), **({"wrong": wrong} if wrong else {})}
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Outcome(DIFFERS, "; ".join(wrong[:3]) + more, found) if wrong else Outcome(OK, right, found)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a check knows of its rank.

    Attributes:
        name: The check's name, under which its ranks meet at the store.
        device: This rank's device, such as `cuda:1`.
        backend: The backend for that device, such as "nccl".
        parameters: Size of the model for memory and speed.
        limit: Seconds after which a collective raises.
    """

    name: str
    device: torch.device
    backend: str
    parameters: int
    limit: float

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(os.environ["WORLD_SIZE"])

    @property
    def module(self) -> Any:
        """Torch's module of the device, such as `torch.cuda`."""
        return torch.get_device_module(self.device.type)

    @contextlib.contextmanager
    def group(self, *, bound: bool = False) -> Iterator[None]:
        """Open torch's default process group, with Gloo for CPU tensors too.

        Args:
            bound: Whether to pass `device_id`, which makes NCCL connect at once and lets it split groups.
        """
        kind = self.device.type
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{self.backend}"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"doctor/{self.name}/{bound}", store_of(self.limit)),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=self.limit),
            device_id=self.device if bound and kind != "cpu" else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()

    def agree(self, value: object) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def store_of(seconds: float) -> dist.Store:
    """Return torchrun's store, by which the ranks of this job find each other."""
    # torchrun's agent hosts the store. Under other launchers rank 0 hosts it.
    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    first = int(os.environ["RANK"]) == 0 and own and "THINWIRE_DOCTOR_CHILD" not in os.environ
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=first,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=seconds),
    )


@dataclass(frozen=True)
class Check:
    """One row of the doctor's table.

    Args:
        run: The check.
        limit: Seconds after which it counts as hung.
    """

    run: Callable[[Surroundings], Outcome]
    limit: float
