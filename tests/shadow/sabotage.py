"""Precautions of the engine, removed one at a time: the shadow device must report each as races.

`python -m tests.shadow.sabotage` prints the table of docs/accelerators.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.harness import end_warm_ranks, run_ranks
from tests.shadow import device
from tests.shadow.device import SHADOW
from tests.shadow.matrix import trained
from thinwire.engine.comm.pending import Issued
from thinwire.engine.futures import Result
from thinwire.engine.streams import SideStream, Writers


@dataclass(frozen=True)
class Cut:
    """A precaution, and a set-up of the matrix in which its absence shows."""

    where: str
    set_up: str
    remove: Callable[[pytest.MonkeyPatch], None]


def _without(owner: type, method: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, method, lambda self, *args: None)


def _without_devices(patch: pytest.MonkeyPatch) -> None:
    init = Result.__init__

    def plain(self: Result, device: torch.device, awaited: Any = None) -> None:
        init(self, torch.device("cpu"), awaited)

    patch.setattr(Result, "__init__", plain)


def _without_waits(patch: pytest.MonkeyPatch) -> None:
    complete = Issued.complete

    def elsewhere(self: Issued) -> None:
        # The bytes must have arrived, or Gloo would fail. But the program's stream does not wait for them.
        streams = torch.get_device_module("shadow")
        with streams.stream(streams.Stream()):
            complete(self)

    patch.setattr(Issued, "complete", elsewhere)


CUTS = {
    "A program waits for the gradients of its bucket": Cut(
        "`streams.py`, `SideStream.after`", "Int8", _without(SideStream, "after")
    ),
    "A bucket's memory is kept while its program uses it": Cut(
        "`streams.py`, `SideStream.keep`", "Join", _without(SideStream, "keep")
    ),
    "The end of a step waits for its programs": Cut(
        "`streams.py`, `SideStream.join`", "FSDP2", _without(SideStream, "join")
    ),
    "A bucket whose means come in parts waits for all of them": Cut(
        "`streams.py`, `Writers.join`", "rules", _without(Writers, "join")
    ),
    "Each part's stream is noted": Cut(
        "`streams.py`, `Writers.note`", "rules, bf16", _without(Writers, "note")
    ),
    "A future orders its readers after the program": Cut(
        "`futures.py`, devices of `Result`", "Int8", _without_devices
    ),
    "A program waits for its collective": Cut("`comm/pending.py`, `Issued.complete`", "Int8", _without_waits),
}


def races(rank: int, world_size: int, precaution: str) -> tuple[int, int, list[str]]:
    """Train with and without a precaution.

    Returns:
        The number of races with it, the number without it, and sentences about the latter.
    """
    cut = CUTS[precaution]
    trained(cut.set_up, "shadow", rank)
    kept = device.counts().get("races", 0)
    device.reset()
    with pytest.MonkeyPatch.context() as patch:
        cut.remove(patch)
        trained(cut.set_up, "shadow", rank)
    return kept, device.counts().get("races", 0), device.races()


def table() -> str:
    """Return the precautions and the races of both ranks as a table in Markdown."""
    lines = ["| precaution | where | set-up | races with it | without it |", "|---|---|---|---|---|"]
    for precaution, cut in CUTS.items():
        found = run_ranks(races, 2, precaution, backend=SHADOW)
        kept, removed = (sum(counts) for counts in list(zip(*found, strict=True))[:2])
        lines.append(f"| {precaution} | {cut.where} | {cut.set_up} | {kept} | {removed} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
    end_warm_ranks()
