"""What the ranks of one life of an episode do, from their start to their end."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.faults.soak.episode import Delay, Episode, Interrupt, Kill, Overflow
from tests.faults.soak.job import Job, Report
from tests.faults.soak.model import flat
from tests.faults.soak.programs import Hook, averages
from tests.faults.soak.states import residuals


@dataclass(frozen=True)
class Point:
    """Where ranks begin: after so many steps, from what that many ranks saved; from nothing at step 0."""

    step: int
    saved_by: int


@dataclass(frozen=True)
class Life:
    """From one start of processes to their end.

    Attributes:
        begin: Where it begins.
        end: After which step it ends.
        base: Where a run without interruptions would have begun with this number of ranks.
        blow: What ends it before its time.
    """

    begin: Point
    end: int
    base: Point
    blow: Kill | Interrupt | None


@dataclass(frozen=True)
class Fall:
    """How a rank learnt that another is gone: in which step, by what error, and after how many seconds."""

    step: int
    kind: str
    text: str
    seconds: float


def live(rank: int, world_size: int, episode: Episode, life: Life, folder: str) -> Fall | list[Report] | None:
    """The life of a rank; at the end of the episode its report, and that of a run without interruptions."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs are started without one
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.getLogger("thinwire").setLevel(logging.ERROR)
    started, step = time.monotonic(), life.begin.step
    try:
        job = _start(rank, world_size, episode, life, life.begin, folder)
        for step in range(life.begin.step, life.end):
            started = time.monotonic()
            job.train(step, _events_of(episode, life, rank, step))
            if step + 1 == life.end or (step + 1) % episode.save_every == 0:
                job.save(folder, step + 1, world_size)
        if life.end < episode.steps:
            return None
        started = time.monotonic()
        report = job.report()
    except RuntimeError as error:
        if life.blow is None:
            raise
        return Fall(step, type(error).__name__, str(error), time.monotonic() - started)
    except KeyboardInterrupt:
        return None
    del job
    return [report, _uninterrupted(rank, world_size, episode, life, folder)]


def _start(
    rank: int, world_size: int, episode: Episode, life: Life, begin: Point, folder: str, *, calm: bool = False
) -> Job:
    """A job as it was after a step: anew, from this rank's checkpoint, or from those of another world."""
    resumed = begin.step > life.base.step
    # A state of torch's kind does not know DDP's buckets; a wire's does, whatever their size is by then.
    by_torch = isinstance(episode.program_at(begin.step), Hook)
    job = Job(
        episode,
        rank,
        begin.step,
        calm=calm,
        settled=resumed and by_torch,
        bucket_mb=0.005 if resumed and not by_torch else episode.bucket_mb,
    )
    own = begin.saved_by == world_size
    if begin.saved_by:
        job.load(folder, begin.step, begin.saved_by, own=own)
    if begin.saved_by and not own and not calm:
        loaded = {"residuals": residuals(job.parts()["wire"]), "parameters": flat(job.model)}
        torch.save(loaded, Path(folder, f"loaded by {rank}"))
    return job


def _uninterrupted(rank: int, world_size: int, episode: Episode, life: Life, folder: str) -> Report:
    """The same training without deaths, restarts and delays."""
    job = _start(rank, world_size, episode, life, life.base, folder, calm=True)
    bad = {event.step for event in episode.events if isinstance(event, Overflow)}
    for step in range(life.base.step, episode.steps):
        if step in bad and not averages(job.program):
            job.leave_out()
        else:
            job.train(step, lambda place: None)
    return job.report()


def _events_of(episode: Episode, life: Life, rank: int, step: int) -> Callable[[str], None]:
    """What happens to this rank in a step, by where in it."""
    blow = life.blow

    def happen(place: str) -> None:
        for event in episode.events:
            if isinstance(event, Delay) and (event.step, event.rank, place) == (step, rank, "before"):
                time.sleep(event.seconds)
        if blow is None or blow.rank != rank:
            return
        if isinstance(blow, Kill):
            if blow.place == "anywhere" and (blow.step, "before") == (step, place):
                signal.setitimer(signal.ITIMER_REAL, blow.seconds)  # SIGALRM kills, and asks nobody
            elif (blow.step, blow.place) == (step, place) or step > blow.step:
                os.kill(os.getpid(), signal.SIGKILL)
        elif (blow.step, "backward") == (step, place):
            os.kill(os.getpid(), signal.SIGINT)

    return happen
