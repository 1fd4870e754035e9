"""Runs an episode, life after life, and holds what comes out against what thinwire promises."""

import multiprocessing
import re
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.faults.soak.episode import Episode, Interrupt, Kill, Resize, Resume, draw_episode
from tests.faults.soak.job import Report
from tests.faults.soak.life import Fall, Life, Point, live
from tests.faults.soak.programs import averages
from tests.faults.soak.states import different, latest, place, residuals
from tests.harness import run_ranks, warm_processes

LIMIT = 10.0
"""Seconds that a collective may take where a rank is going to be lost; otherwise nobody shall be hurried."""
PATIENCE = 180.0
HANG = 600.0
"""Seconds after which the ranks of a life hang."""
_NOTHING = Point(0, 0)


def run_episode(seed: int) -> None:
    """Raises AssertionError where something is not as it should be."""
    episode = draw_episode(seed)
    threads = threading.active_count()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        _live_through(episode, folder)
    assert not set(multiprocessing.active_children()) - set(warm_processes()), "processes are left"
    assert threading.active_count() <= threads, "threads are left"


def attempt(seed: int) -> str | None:
    """What was wrong with an episode; None if nothing was."""
    try:
        run_episode(seed)
    except Exception as error:
        return f"{draw_episode(seed)}\n{type(error).__name__}: {error}"
    return None


def _live_through(episode: Episode, folder: str) -> None:
    world_size, begin, base = episode.world_size, _NOTHING, _NOTHING
    resized_from = 0
    turns = [event for event in episode.events if isinstance(event, Kill | Interrupt | Resume | Resize)]
    for turn in [*turns, None]:
        blow = turn if isinstance(turn, Kill | Interrupt) else None
        end = episode.steps if turn is None or blow is not None else turn.step
        results = _run(episode, Life(begin, end, base, blow), world_size, folder)
        if resized_from:
            check_nothing_was_lost(folder, base.step, resized_from, world_size)
            resized_from = 0
        if turn is None:
            check_reports(episode, results)
        elif blow is not None:
            check_falls(episode, blow, begin.step, results)
            step = latest(folder, world_size)
            begin = base if step is None else Point(step, world_size)
        elif isinstance(turn, Resize):
            resized_from = world_size
            begin = base = Point(turn.step, world_size)
            world_size = turn.world_size
        else:
            begin = Point(turn.step, world_size)


def _run(episode: Episode, life: Life, world_size: int, folder: str) -> list[Any]:
    dies = {life.blow.rank} if isinstance(life.blow, Kill) else set()
    limit = PATIENCE if life.blow is None else LIMIT
    return run_ranks(live, world_size, episode, life, folder, seconds=HANG, group_timeout=limit, dies=dies)


def check_falls(episode: Episode, blow: Kill | Interrupt, begin: int, results: Sequence[Any]) -> None:
    """Every other rank raised a WireError that names the lost one, in time."""
    for rank, fall in enumerate(results):
        if rank == blow.rank:
            assert fall is None, f"{blow} did not end rank {rank}"
            continue
        assert isinstance(fall, Fall), f"after {blow} rank {rank} went on as if nothing were"
        if fall.kind == "RuntimeError" and _ddp_talks(episode, blow, fall.step, begin):
            continue
        assert fall.kind == "WireError", f"after {blow} rank {rank} raised {fall.kind}: {fall.text}"
        named = re.search(rf"ranks? ([0-9]+, )*{blow.rank}\b", fall.text, re.IGNORECASE)
        assert named, f"rank {rank} does not name {blow}: {fall.text}"
        assert fall.seconds < PATIENCE / 2, (
            f"after {blow} rank {rank} waited {fall.seconds:.1f} s: {fall.text}"
        )


def _ddp_talks(episode: Episode, blow: Kill | Interrupt, step: int, begin: int) -> bool:
    """Whether DDP has collectives of its own in a step beside ours, whose errors name nobody.

    In its second forward it compares its final buckets. Under `find_unused_parameters` it asks in every
    backward what was used; that comes after our own collectives, but averaging has none in most steps, and
    a rank may die in between.
    """
    between = isinstance(blow, Kill) and blow.place == "anywhere"
    used = episode.unused and (between or averages(episode.program_at(step + 1)))
    return step <= begin + 1 or used


def check_nothing_was_lost(folder: str, step: int, old: int, new: int) -> None:
    """Another number of ranks: what all together owe to the mean is the same, and all hold one model."""
    saved = [torch.load(place(folder, step, rank, old), weights_only=True) for rank in range(old)]
    loaded = [torch.load(Path(folder, f"loaded by {rank}"), weights_only=True) for rank in range(new)]
    before = _owed([residuals(one["wire"]) for one in saved])
    after = _owed([one["residuals"] for one in loaded])
    assert before.keys() == after.keys(), f"residuals of {sorted(before.keys() ^ after.keys())} are missing"
    for slot, owed in before.items():
        gap = (after[slot] - owed).abs().max()
        assert gap <= 1e-5 * _largest(saved, slot), f"residuals of {slot} differ by {gap:.3g}"
    for rank, one in enumerate(loaded):
        same = torch.equal(one["parameters"], loaded[0]["parameters"])
        assert same, f"rank {rank} differs from rank 0 after {old} ranks became {new}"


def _largest(saved: Sequence[Any], slot: Any) -> float:
    return max(float(own[slot].abs().max()) for one in saved if slot in (own := residuals(one["wire"])))


def _owed(ranks: Sequence[dict[Any, torch.Tensor]]) -> dict[Any, torch.Tensor]:
    slots = dict.fromkeys(slot for one in ranks for slot in one)
    return {
        slot: torch.stack([one[slot].double() for one in ranks if slot in one]).sum(0) / len(ranks)
        for slot in slots
    }


def check_reports(episode: Episode, results: Sequence[Any]) -> None:
    """All ranks agree, everything is finite, and nothing that happened has left a trace."""
    reports: list[tuple[Report, Report]] = [tuple(result) for result in results]
    for rank, (own, reference) in enumerate(reports):
        assert not own.not_finite, f"not finite on rank {rank}: {own.not_finite[:5]}"
        first = reports[0][0]
        assert own.steps == first.steps, f"rank {rank} counts {own.steps} steps, rank 0 {first.steps}"
        assert torch.equal(own.parameters, first.parameters), (
            f"rank {rank} differs from rank 0 by {_gap(own.parameters, first.parameters)}"
        )
        if not averages(episode.program_at(episode.steps)):
            assert own.digests["scaler"] == first.digests["scaler"], f"rank {rank} has another scale"
        assert own.steps == reference.steps, f"{own.steps} steps, uninterrupted {reference.steps}"
        for part in own.digests:
            assert own.digests[part] == reference.digests[part], (
                f"rank {rank}'s {part} is not that of the uninterrupted run:"
                f" {different(own.parts[part], reference.parts[part])}"
            )
        assert torch.equal(own.parameters, reference.parameters), f"rank {rank} ends elsewhere"


def _gap(one: torch.Tensor, other: torch.Tensor) -> str:
    return f"up to {(one - other).abs().max():.3g} in {int((one != other).sum())} of {one.numel()} numbers"
