"""The recommendation of a plan: one candidate, or none, and the reason."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from thinwire.plan.gaps import UNKNOWN_KIND
from thinwire.plan.network import Network
from thinwire.plan.planner import MODEL_ERROR, Row
from thinwire.plan.units import show_bytes, show_rate, show_seconds

MAX_GAP = 0.01
"""The default of the largest expected loss gap."""
WORTH = 1 + MODEL_ERROR
"""The smallest speed-up that is recommended. Below the error of the prediction it may be none."""
_CHANGES = "It averages models instead of gradients, which changes training more: compare losses first."
_NEAR = 1.05
"""Within this ratio of step times, the candidate with the smallest loss gap is preferred."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The constraints of a recommendation.

    Attributes:
        gap: The largest expected loss gap. Candidates whose gap was never measured are not recommended.
            Where it was measured on another kind of model, gradient programs are judged by that, and
            averaged models, whose gaps differ more, are not recommended.
        memory: The most bytes beyond plain DDP. None for no limit.
        exclude: Names of programs to leave out, with or without their options.
    """

    gap: float = MAX_GAP
    memory: float | None = None
    exclude: Collection[str] = ()

    def objection(self, row: Row) -> str | None:
        """Return why a candidate is not recommended, or None."""
        name = row.candidate.name
        if any(
            name == excluded or name.partition("(")[0].lower() == excluded.lower()
            for excluded in self.exclude
        ):
            return "excluded"
        if row.gap is None:
            return "its loss gap is unknown"
        if row.gap.elsewhere and row.candidate.averaging is not None:
            return f"its loss gap is {UNKNOWN_KIND}"
        if row.gap.value > self.gap:
            return f"its loss gap of {100 * row.gap.value:.2g} % exceeds {100 * self.gap:.2g} %"
        if self.memory is not None and row.memory > self.memory:
            return f"it takes {show_bytes(row.memory)} of memory, more than {show_bytes(self.memory)}"
        return None


@dataclass(frozen=True)
class Recommendation:
    """A recommendation and its reason.

    Attributes:
        row: The recommended candidate, or None to stay with plain DDP.
        text: The recommendation and its reason, as sentences.
        alternative: Averaged models that are faster than the recommended gradient program, or None.
    """

    row: Row | None
    text: str
    alternative: Row | None = None


def recommend(
    rows: Sequence[Row], network: Network, limits: Limits, steps: int | None = None
) -> Recommendation:
    """Choose the fastest candidate within the limits, or plain DDP.

    A candidate must be faster than plain DDP by more than `WORTH`. Gradient programs come first. Averaged
    models, which change training more, are the alternative where they are faster still, or the
    recommendation where no gradient program pays. Of those within 5 % of the fastest, the one with the
    smallest loss gap wins, then the one that takes less memory.

    Args:
        rows: The plan of every candidate, plain DDP first.
        network: The network of the plan.
        limits: The constraints.
        steps: The number of steps of the training, for its predicted duration.
    """
    plain, others = rows[0], [row for row in rows[1:] if limits.objection(row) is None]
    here = f"{network.ranks} hosts, {_link_text(network)}"
    share = plain.cost.exposed / plain.cost.step
    spent = f"plain DDP waits {share:.0%} of a step for the network"
    paying = [row for row in others if row.speed_up > WORTH]
    if not paying:
        best = max(others, key=lambda row: row.speed_up, default=None)
        reason = (
            "no program is within the limits"
            if best is None
            else f"the best within the limits, {best.candidate.name}, is {best.speed_up:.2f} x as fast"
        )
        return Recommendation(
            None, f"Don't. On {here}, stay with plain DDP: {spent}, and {reason}.{_tempting(rows, limits)}"
        )
    # Gradient programs first: averaged models change training more, and their loss gaps vary more by model.
    gradients = [row for row in paying if row.candidate.averaging is None]
    averaged = [row for row in paying if row.candidate.averaging is not None]
    best = _best(gradients or averaged)
    other = _best(averaged) if gradients and averaged else None
    if other is not None and other.cost.step * _NEAR > best.cost.step:
        other = None
    text = (
        f"On {here}, use {best.candidate.name}: {spent}; a step takes {show_seconds(best.cost.step)} instead"
        f" of {show_seconds(plain.cost.step)}, {best.speed_up:.2f} x as fast"
        f"{_training(plain, best, steps)}. {_gap_text(best)}{_until(best)}"
    )
    if best.candidate.averaging is not None:
        text += f" No gradient program pays. {_CHANGES}"
    if other is not None:
        text += (
            f" Alternative: {other.candidate.name}, {other.speed_up:.2f} x as fast"
            f"{_training(plain, other, steps)}. {_gap_text(other)} {_CHANGES}"
        )
    return Recommendation(best, text + _tempting(rows, limits, other or best), other)


def _best(rows: Sequence[Row]) -> Row:
    """Return the fastest row, or of those that are nearly as fast, the one with the smallest loss gap."""
    fastest = min(row.cost.step for row in rows)
    # Within a few per cent, predictions do not distinguish candidates. The safest of them wins.
    near = [row for row in rows if row.cost.step <= _NEAR * fastest]
    return min(near, key=lambda row: (round(max(0.0, _gap(row)), 3), row.memory, row.cost.step))


def _gap_text(row: Row) -> str:
    if row.gap is None or not row.gap.elsewhere:
        return f"Expected loss gap: {row.gap}."
    return (
        f"Expected loss gap: {row.gap}; elsewhere {row.gap.measured}. Measure yours: thinwire bench --model."
    )


def _gap(row: Row) -> float:
    return row.gap.value if row.gap else 0.0


def _link_text(network: Network) -> str:
    link = network.link
    rates = (
        show_rate(_rounded(link.up))
        if link.up == link.down
        else f"{show_rate(_rounded(link.up))} up and {show_rate(_rounded(link.down))} down"
    )
    return f"{rates} for data, {show_seconds(2 * link.latency)} round trip"


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def _training(plain: Row, best: Row, steps: int | None) -> str:
    if steps is None:
        return ""
    return (
        f"; {steps} steps take {_hours(steps * best.cost.step)} instead of {_hours(steps * plain.cost.step)}"
    )


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _until(best: Row) -> str:
    if best.crossover is None or best.crossover == float("inf"):
        return ""
    return f" It stops paying above {show_rate(_rounded(best.crossover))}."


def _tempting(rows: Sequence[Row], limits: Limits, best: Row | None = None) -> str:
    """Return a sentence about the fastest candidate that the limits exclude, if it is faster."""
    floor = best.speed_up if best else WORTH
    others = [(row, limits.objection(row)) for row in rows[1:] if row.speed_up > _NEAR * floor]
    rejected = [(row, why) for row, why in others if why and why != "excluded"]
    if not rejected:
        return ""
    row, why = max(rejected, key=lambda pair: pair[0].speed_up)
    return f" Faster, but {why}: {row.candidate.name} ({row.speed_up:.2f} x)."
