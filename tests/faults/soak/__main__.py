"""`make soak`: many random episodes of training with faults. The last line tells how they went."""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from tests.faults.soak.run import attempt

_PROGRESS_EVERY = 20
_AT_ONCE = 2


def run_all(seeds: Iterable[int], deadline: float) -> Iterator[tuple[int, str | None]]:
    """Two at a time, each in a process with a fork server of its own; no new ones after the deadline."""
    waiting, running = iter(seeds), dict[Future[str | None], int]()
    with ProcessPoolExecutor(_AT_ONCE, multiprocessing.get_context("spawn")) as pool:
        while True:
            while len(running) < _AT_ONCE and time.monotonic() < deadline:
                seed = next(waiting, None)
                if seed is None:
                    break
                running[pool.submit(attempt, seed)] = seed
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                try:
                    wrong = future.result()
                except BrokenProcessPool as error:
                    wrong, deadline = f"the process that ran it has died: {error}", 0.0
                yield running.pop(future), wrong


def summary(outcomes: dict[int, bool], asked: int, seconds: float) -> str:
    """The last line."""
    bad = sorted(seed for seed, fine in outcomes.items() if not fine)
    took = f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
    seeds = f"seeds {min(outcomes)} to {max(outcomes)}" if outcomes else "no seeds"
    short = "" if len(outcomes) == asked else f" of {asked}"
    told = f" (seeds {', '.join(map(str, bad))})" if bad else ""
    return (
        f"soak: {len(outcomes)}{short} episode{'' if len(outcomes) == 1 else 's'} in {took}, {seeds}:"
        f" {len(outcomes) - len(bad)} as they should be, {len(bad)} not{told}"
        f"{'; stopped before the others' if short else ''}"
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1000, help="of the first episode")
    parser.add_argument("--episodes", type=int, default=320)
    parser.add_argument("--minutes", type=float, default=20, help="after which no new episode begins")
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of lost ranks the backend has much to say
    started, outcomes = time.monotonic(), dict[int, bool]()
    seeds = range(options.seed, options.seed + options.episodes)
    for seed, wrong in run_all(seeds, started + 60 * options.minutes):
        outcomes[seed] = wrong is None
        if wrong is not None:
            print(f"seed {seed}: {wrong}\n", file=sys.stderr, flush=True)
        if len(outcomes) % _PROGRESS_EVERY == 0:
            failed = len(outcomes) - sum(outcomes.values())
            print(f"{len(outcomes)} of {len(seeds)} episodes, {failed} failed", file=sys.stderr, flush=True)
    print(summary(outcomes, len(seeds), time.monotonic() - started), flush=True)
    return 0 if outcomes and all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
