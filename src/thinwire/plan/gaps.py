"""Measured loss gaps: the relative distance to plain DDP's loss after equal steps. Unknown is not zero.

A gap says little about another kind of model. All shipped gaps are of transformers. For other models they are
shown as unknown, and only exclude gradient programs that lost too much.

`gaps.json` holds the tables of docs/benchmarks.md, with the command of each. A results file of `thinwire
bench` on the user's own model takes precedence (`thinwire.tools.bench.predict`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from torch import nn

from thinwire.programs.description import short

TRANSFORMER = "transformer"
_SIGNS = ("attention", "transformer", "gpt")
"""Parts of the names of a transformer's layers."""
_VISIBLE = 0.00005
"""The least gap that two decimals of a per cent show."""
UNKNOWN_KIND = "unknown for this kind of model"

EXACT = ("DDP", "Exact()")
"""Programs with an exact mean, whose loss gap is 0 except for the order of sums."""


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
        elsewhere: Whether it was measured on another kind of model.
    """

    value: float
    source: str
    model: str = ""
    parameters: int = 0
    steps: int = 0
    command: str = ""
    elsewhere: bool = False

    def __str__(self) -> str:
        return UNKNOWN_KIND if self.elsewhere else self.measured

    @property
    def measured(self) -> str:
        """The measurement as text, with the model it was measured on.

        A loss below plain DDP's is chance, so it is shown as no gap.
        """
        if self.source == "exact":
            return "none (exact)"
        size = "none measured" if self.value < _VISIBLE else f"{100 * self.value:+.2f} %"
        return f"{size} ({self.model}, {self.parameters / 1e6:.2g} M, {self.steps} steps)"


@dataclass(frozen=True, kw_only=True)
class Known:
    """All known gaps for one training.

    Attributes:
        own: The user's own measurements, which take precedence, by program as `short` writes it.
        steps: The number of steps of the training. Of several measurements, that of the nearest length is
            taken, or the largest gap where the length is not known.
        kind: The kind of the model, from `kind_of`. Shipped gaps are of transformers.
    """

    own: Mapping[str, Gap] = field(default_factory=dict)
    steps: int | None = None
    kind: str = ""

    def gap(self, argument: object) -> Gap | None:
        """Return the expected gap of a program, or None if it is unknown.

        Args:
            argument: The argument of `attach`, or None for plain DDP.

        >>> from thinwire import Exact, Int4, RandomK
        >>> known = Known(kind=TRANSFORMER)
        >>> str(known.gap(Exact())), str(known.gap(Int4())), known.gap(RandomK())
        ('none (exact)', '+0.17 % (gpt-1m, 1.3 M, 256 steps)', None)
        >>> str(Known().gap(Int4()))
        'unknown for this kind of model'
        """
        name = "DDP" if argument is None else short(argument)
        if name in EXACT:
            return Gap(0.0, "exact")
        if name in self.own:
            return self.own[name]
        found = shipped().get(name, [])
        if not found:
            return None
        # The gap depends on the length of training: DiLoCo's after 2048 steps is +2.4 %, after 4096 +0.4 %.
        if self.steps is None:
            chosen = max(found, key=lambda gap: gap.value)
        else:
            wanted = math.log(self.steps)
            chosen = min(found, key=lambda gap: abs(math.log(gap.steps) - wanted))
        return replace(chosen, elsewhere=self.kind != TRANSFORMER)


def kind_of(model: nn.Module) -> str:
    """Return the kind of a model, by which loss gaps are compared.

    Returns:
        `TRANSFORMER` if layers are named after attention and most weights are not convolutions, otherwise an
        empty text.
    """
    sizes = [(parameter.dim(), parameter.numel()) for parameter in model.parameters()]
    convolved = sum(numbers for dimensions, numbers in sizes if dimensions > 2)
    names = (type(module).__name__.lower() for module in model.modules())
    attends = any(sign in name for name in names for sign in _SIGNS)
    return TRANSFORMER if attends and 2 * convolved < sum(numbers for _, numbers in sizes) else ""


@cache
def shipped() -> Mapping[str, list[Gap]]:
    """Return the gaps of the benchmark tables that are part of the package."""
    tables = json.loads((files("thinwire.plan") / "gaps.json").read_text(encoding="utf-8"))
    found: dict[str, list[Gap]] = {}
    for table in tables:
        what = ("benchmark", table["model"], table["parameters"], table["steps"], table["command"])
        # Tables hold losses beside plain DDP's own, or gaps where only these were recorded.
        gaps = {program: loss / table["plain"] - 1 for program, loss in table.get("losses", {}).items()}
        for program, gap in (gaps | table.get("gaps", {})).items():
            found.setdefault(program, []).append(Gap(gap, *what))
    return found
