"""Loss gaps that were measured: after equal steps, relative to plain DDP. Others are unknown, not zero.

`gaps.json` holds the tables of docs/benchmarks.md and docs/design/decisions.md, with the command of each. A
results file of `thinwire bench` on the user's own model takes precedence (`thinwire.bench.predict`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from thinwire.programs.naming import short

EXACT = ("DDP", "Exact()")
"""What averages exactly, so that its gap is 0 except for the order of sums."""


@dataclass(frozen=True)
class Gap:
    """An expected loss gap and its source.

    Attributes:
        value: The relative distance to plain DDP's loss after equal steps. Positive is worse.
        source: How it is known: `"exact"`, `"results file"` or `"benchmark"`.
        model: The model that was trained. Empty for exact programs.
        parameters: The number of its parameters.
        steps: The number of steps.
        command: The command that measured it.
    """

    value: float
    source: str
    model: str = ""
    parameters: int = 0
    steps: int = 0
    command: str = ""

    def __str__(self) -> str:
        text = f"{100 * self.value:+.2f} %".replace("-0.00", "+0.00")
        if self.source == "exact":
            return f"{text} (exact)"
        return f"{text} ({self.model}, {self.parameters / 1e6:.2g} M, {self.steps} steps)"


@dataclass(frozen=True, kw_only=True)
class Known:
    """All gaps that are known for a training.

    Attributes:
        own: The user's own measurements, which take precedence, by program as `short` writes it.
        steps: The number of steps of the training. Of several measurements, that of the nearest length is
            taken, or the largest gap where the length is not known.
    """

    own: Mapping[str, Gap] = field(default_factory=dict)
    steps: int | None = None

    def gap(self, given: object) -> Gap | None:
        """Return the expected gap of a program, or None if it is unknown.

        Args:
            given: What `attach` would be given, or None for plain DDP.

        >>> from thinwire import Exact, Int4, RandomK
        >>> str(Known().gap(Exact())), str(Known().gap(Int4())), Known().gap(RandomK())
        ('+0.00 % (exact)', '+0.17 % (gpt-1m, 1.3 M, 256 steps)', None)
        """
        name = "DDP" if given is None else short(given)
        if name in EXACT:
            return Gap(0.0, "exact")
        if name in self.own:
            return self.own[name]
        found = shipped().get(name, [])
        if self.steps is None:
            return max(found, key=lambda one: one.value, default=None)
        wanted = math.log(self.steps)
        return min(found, key=lambda one: abs(math.log(one.steps) - wanted), default=None)


@cache
def shipped() -> Mapping[str, list[Gap]]:
    """Return the gaps of the benchmark tables that are part of the package."""
    tables = json.loads((files("thinwire.plan") / "gaps.json").read_text(encoding="utf-8"))
    found: dict[str, list[Gap]] = {}
    for one in tables:
        what = ("benchmark", one["model"], one["parameters"], one["steps"], one["command"])
        gaps = {program: loss / one["plain"] - 1 for program, loss in one.get("losses", {}).items()}
        for program, gap in (gaps | one.get("gaps", {})).items():
            found.setdefault(program, []).append(Gap(gap, *what))
    return found
