"""A soak of live membership. Replicas of one job are killed at random times, and rejoin.

    python benchmarks/live_soak.py --episodes 50 --minutes 20

One job of three replicas trains continuously. In each episode a random replica is killed with SIGKILL at a
random moment, between exchanges or in one. The others must commit exchanges without it, and with it again
after its restart. No two replicas may ever differ in the anchors of an exchange. At the end all models must
be equal. The last line has the number of episodes.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.live_job import Job, Plan, loaded_context


def episode(job: Job, chance: random.Random) -> tuple[float, float]:
    """Kill a replica and start it again; return when the others and then all had committed an exchange."""
    victim = chance.randrange(job.plan.replicas)
    others = [place for place in range(job.plan.replicas) if place != victim]
    time.sleep(chance.uniform(0, 0.5))
    before = max(one["exchanges"] for place in others for one in job.exchanges(place)[-1:])
    job.kill(victim)
    began = time.monotonic()

    def went_on() -> bool:
        return all(job.exchanges(place)[-1]["exchanges"] > before + 1 for place in others)

    def all_there() -> bool:
        rows = [job.exchanges(place)[-1:] for place in range(job.plan.replicas)]
        return all(row and len(row[0]["replicas"]) == job.plan.replicas for row in rows)

    job.await_("an exchange of the others", went_on)
    alone = time.monotonic() - began
    job.start(victim)
    job.await_("the return of the killed replica", all_there)
    return alone, time.monotonic() - began


def check(job: Job, known: dict[int, tuple[int, int]]) -> int:
    """Compare the anchors of all exchanges of all replicas; return the most uncommitted ones of a life."""
    failures = 0
    for place, life in enumerate(job.lives):
        for row in job.exchanges(place):
            number, found = row["exchanges"], (row["anchors"], row["step"])
            assert known.setdefault(number, found) == found, f"replica {place} drifted in exchange {number}"
        failures = max(failures, job.log(place, life).count("was not committed"))
    return failures


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", default=Plan.program)
    options = parser.parse_args()
    chance, deadline = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    times: list[tuple[float, float]] = []
    known: dict[int, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(folder=Path(folder), program=options.program, pause=0.03)
        with Job(plan, loaded_context()) as job:
            everyone = range(plan.replicas)
            job.await_("the start", lambda: all(job.exchanges(one)[2:] for one in everyone))
            while len(times) < options.episodes and time.monotonic() < deadline:
                times.append(episode(job, chance))
                check(job, known)
                alone, back = times[-1]
                print(f"episode {len(times)}: others after {alone:.1f} s, all after {back:.1f} s", flush=True)
            failures = check(job, known)
            results = job.end()
    assert len({one["digest"] for one in results}) == 1, f"models differ at the end: {results}"
    alone, back = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"medians: the others went on after {alone:.1f} s, all of them after {back:.1f} s")
    print(
        f"{len(times)} of {options.episodes} episodes passed: {len(known)} exchanges compared, no drift,"
        f" at most {failures} not committed in a life"
    )
    return 0 if len(times) == options.episodes else 1


if __name__ == "__main__":
    sys.exit(main())
