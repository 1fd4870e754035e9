"""A soak of live membership: replicas are killed, frozen or cut off at random times, and come back.

    python benchmarks/live_soak.py --episodes 50 --minutes 20

One job of three replicas trains, each replica on its own emulated host. In each episode something
happens to a random replica at a random moment, between exchanges or in one:

    kill      SIGKILL, and later another start
    freeze    SIGSTOP for longer than the time limit of collectives, then SIGCONT
    cut       its network is gone for longer than that limit: connections stay open, and packets are lost

The others must commit exchanges without it, and with it again after its return. No two replicas may differ in
the anchors of an exchange. At the end all models must be equal. The last line has the number of episodes.
Without network namespaces, nothing is cut.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.live_job import Job, loaded_context
from benchmarks.live_replica import Plan
from thinwire.errors import UnavailableError
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan as network_plan

_LASTS = 1.25
"""The time that a replica is frozen or cut off, in time limits of a collective."""

Harm = tuple[Callable[[int], None], Callable[[int], None], float]
"""A fault of a replica, the event that ends it, and the least number of seconds between them."""


def episode(job: Job, kind: Harm, chance: random.Random) -> tuple[float, float]:
    """Harm a replica and undo it; return how long the others, and then all, took to commit an exchange."""
    harm, undo, lasts = kind
    victim = chance.randrange(job.plan.replicas)
    others = [place for place in range(job.plan.replicas) if place != victim]
    time.sleep(chance.uniform(0, 0.5))
    before = max(row["exchanges"] for place in others for row in job.exchanges(place)[-1:])
    harm(victim)
    began = time.monotonic()

    def went_on() -> bool:
        return all(job.exchanges(place)[-1]["exchanges"] > before + 1 for place in others)

    job.await_("an exchange of the others", went_on)
    alone = time.monotonic() - began
    time.sleep(max(0.0, lasts - alone))
    undo(victim)
    again = time.monotonic()
    job.await_("the return of the replica", job.all_there)
    return alone, time.monotonic() - again


def check(job: Job) -> tuple[int, int]:
    """Compare the anchors of all exchanges of all lives; return how many, and the most that failed in one."""
    known: dict[int, tuple[int, int]] = {}
    failures = 0
    for place, latest in enumerate(job.lives):
        for life in range(latest + 1):
            for number, row in settled(job.exchanges(place, life)).items():
                found = row["anchors"], row["step"]
                assert known.setdefault(number, found) == found, (
                    f"{place}-{life} drifted in exchange {number}"
                )
            failures = max(failures, job.log(place, life).count("was not committed"))
    return len(known), failures


def settled(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return rows by exchange, without those that the replica lost again when it received a peer's state."""
    kept: dict[int, dict[str, Any]] = {}
    for row in rows:
        number = row["exchanges"]
        kept = {known: value for known, value in kept.items() if known < number} | {number: row}
    return kept


def run(options: argparse.Namespace, folder: Path, lab: Lab | None) -> int:
    """Run the episodes, and print what was found."""
    chance, deadline = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    plan = Plan(folder=folder, program=options.program, pause=0.03, timeout=options.timeout)
    times: list[tuple[float, float]] = []
    counts: Counter[str] = Counter()
    with Job(plan, loaded_context(), lab) as job:
        harms: dict[str, Harm] = {
            "kill": (job.kill, job.start, 0.0),
            "freeze": (job.freeze, job.thaw, _LASTS * plan.timeout),
        }
        if lab is not None:
            harms["cut"] = (lab.cut, lab.mend, _LASTS * plan.timeout)
        chosen = [name for name in options.only.split(",") if name in harms] or list(harms)
        job.await_start()
        while len(times) < options.episodes and time.monotonic() < deadline:
            kind = chance.choice(chosen)
            times.append(episode(job, harms[kind], chance))
            counts[kind] += 1
            check(job)
            alone, back = times[-1]
            print(
                f"episode {len(times)}: {kind}; others after {alone:.1f} s, back in {back:.1f} s", flush=True
            )
        compared, failures = check(job)
        results = job.end()
    assert len({result["digest"] for result in results}) == 1, f"models differ at the end: {results}"
    alone, back = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"medians: the others went on after {alone:.1f} s; the replica was back in {back:.1f} s")
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
    print(
        f"{len(times)} of {options.episodes} episodes passed ({kinds}): {compared} exchanges compared,"
        f" no drift, at most {failures} not committed in a life"
    )
    return 0 if len(times) == options.episodes else 1


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds after which a collective fails")
    parser.add_argument("--only", default="", help="kinds of episodes, as kill,freeze,cut")
    parser.add_argument("--program", default=Plan.program)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(network_plan(hosts=Plan.replicas + 1)))
        except UnavailableError as error:
            print(f"nothing will be cut: {error}")
            lab = None
        return run(options, Path(folder), lab)


if __name__ == "__main__":
    sys.exit(main())
