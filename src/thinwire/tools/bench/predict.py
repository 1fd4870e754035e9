"""The planner's predictions of a benchmark, term by term, and loss gaps for plans from its results."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.engine.meter import GRADIENTS, MODELS
from thinwire.errors import OptionError, StateError
from thinwire.plan.candidates import PLAIN_DDP, Candidate
from thinwire.plan.compute import Measured
from thinwire.plan.cost import Compute, Cost
from thinwire.plan.encode import Speeds, contention
from thinwire.plan.gaps import Gap
from thinwire.plan.network import FRAMING, Link, Network
from thinwire.plan.planner import Planner
from thinwire.programs.description import short
from thinwire.telemetry.log import Log
from thinwire.tools.bench.parsing import names_code, parse_saved
from thinwire.tools.bench.results import Cell, Results, Track
from thinwire.tools.bench.summary import Row, rows

TERMS = ("step", "bytes", "encode", "wire", "exposed")


@dataclass(frozen=True)
class Prediction:
    """A contestant's measured and predicted costs.

    Attributes:
        name: The contestant.
        predicted: The predicted cost.
        measured: The measured terms by name.
    """

    name: str
    predicted: Cost
    measured: Mapping[str, float]

    def error(self, term: str = "step") -> float | None:
        """Return the relative error of a term, or None if it was not measured."""
        found = self.measured.get(term)
        return float(getattr(self.predicted, term)) / found - 1 if found else None


def predict(
    cell: Cell,
    model: Measured,
    cores: float,
    network: Network | None = None,
    named: Collection[str] = (),
) -> list[Prediction]:
    """Predict the costs of all contestants of a cell that the planner supports.

    The time without communication is measured, by the contestant that does not communicate. All other terms
    are predicted.

    Args:
        cell: The measurements.
        model: The model's shapes, and the times at which its gradients are ready, measured here.
        cores: The cores that all hosts of the cell share.
        network: The probed network. None to use the rate of the cell's link.
        named: The programs that the user named. Code in the cell's texts is imported for these only.

    Raises:
        StateError: The cell has no measurements.
    """
    found = {row.name: row for row in rows(cell) if row.step}
    alone = next((track for track in cell.tracks if track.kind == "alone"), None)
    if not found or alone is None:
        raise StateError(f"{cell.workload} on {cell.network} has no measurements: {cell.error or 'run it'}")
    compute = _stretched(model.compute, alone, next(iter(found.values())), cores / cell.hosts)
    speeds = Speeds(factor=contention(cores / cell.hosts))
    planner = Planner(replace(model, compute=compute), speeds=speeds)
    there = network or _given(cell)
    return [
        Prediction(track.name, planner.cost(candidate, there), _measured(found[track.name]))
        for track, candidate in _candidates(cell.tracks, named)
        if track.name in found
    ]


def predict_log(log: Log, planner: Planner, candidate: Candidate, network: Network) -> Prediction:
    """Predict the costs of a training whose log was written by `telemetry.JsonLines`.

    Args:
        log: The log. Its medians are compared, those of averaged models as means over all steps.
        planner: The planner for the model.
        candidate: The program that was attached.
        network: The network.

    Raises:
        StateError: The log has no exchanges of the kind that the candidate makes.
    """
    purpose = GRADIENTS if candidate.averaging is None else MODELS
    series = log.series.get(purpose)
    if series is None or not series.steps:
        raise StateError(
            f"the log has no exchange of {purpose}, as {candidate.name} makes: pass the program that ran"
        )
    share = 1.0 if candidate.averaging is None else 1 / candidate.period
    terms: dict[str, Sequence[float]] = {
        "bytes": series.own,
        "wire": series.wire,
        "exposed": series.exposed,
    }
    measured = {
        name: share * statistics.median(known)
        for name, column in terms.items()
        if (known := [float(value) for value in column if math.isfinite(value)])
    }
    return Prediction(candidate.name, planner.cost(candidate, network), measured)


def _candidates(tracks: Iterable[Track], named: Collection[str]) -> Iterable[tuple[Track, Candidate]]:
    for track in tracks:
        if track.kind == "ddp":
            yield track, replace(PLAIN_DDP, bucket_mb=track.bucket_mb)
        elif track.kind == "thinwire":
            try:
                candidate = Candidate.of(track.text, parse_saved(track.text, named))
            except OptionError:  # unsupported by the planner, or code that `left_out` lists
                continue
            yield track, replace(candidate, bucket_mb=track.bucket_mb)


def _given(cell: Cell) -> Network:
    rate = FRAMING * cell.rate if cell.rate else math.inf
    return Network(ranks=cell.hosts, link=Link(up=rate, down=rate))


def _stretched(here: Compute, alone: Track, plain: Row, cores: float) -> Compute:
    """Return the times of a step of a cell, with gradients ready in the proportions measured here."""
    step = plain.compute or here.step
    first = statistics.median(alone.first_gradient_seconds or [here.arrivals[0]])
    optimizer = statistics.median(alone.optimizer_seconds or [here.optimizer])
    backward = step - optimizer
    begin, end = here.arrivals[0], here.arrivals[-1]
    # Backward's gradients keep their relative times, stretched to the duration that the cell measured.
    scale = (backward - first) / max(1e-9, end - begin)
    return replace(
        here,
        begin=first,
        arrivals=tuple(first + scale * (arrival - begin) for arrival in here.arrivals),
        backward=backward,
        optimizer=optimizer,
        copy_rate=here.copy_rate * min(1.0, cores),
        spread=0.0,  # a cell's times are those of the slowest rank
        cores=cores,
    )


def _measured(row: Row) -> dict[str, float]:
    terms = {
        "step": row.step[1] if row.step else None,
        "bytes": row.meter_bytes or row.device_bytes,
        "encode": row.encode,
        "wire": row.wire,
        "exposed": row.exposed,
    }
    return {name: value for name, value in terms.items() if value is not None}


def left_out(results: Results, named: Collection[str]) -> list[str]:
    """Return the programs of a results file that are code which the user did not name."""
    tracks = (track for cell in results.cells for track in cell.tracks if track.kind == "thinwire")
    return sorted({track.text for track in tracks if names_code(track.text)} - set(named))


def measured_gaps(results: Results, named: Collection[str] = ()) -> dict[str, Gap]:
    """Return the loss gaps of all programs in a results file, the largest where there are several.

    Args:
        results: The results of a benchmark on the model to plan for.
        named: The programs that the user named. Code in the file's texts is imported for these only.
    """
    found: dict[str, Gap] = {}
    for cell in results.cells:
        for row in rows(cell):
            if row.kind != "thinwire" or row.loss_gap is None or not math.isfinite(row.loss_gap):
                continue
            try:
                name = short(parse_saved(row.text, named))
            except OptionError:  # another version's program, or code that `left_out` lists
                continue
            steps = next(track.losses[-1][0] for track in cell.tracks if track.kind == "ddp")
            gap = Gap(row.loss_gap, "results file", cell.workload, cell.parameters, steps, results.command)
            if name not in found or found[name].value < gap.value:
                found[name] = gap
    return found
