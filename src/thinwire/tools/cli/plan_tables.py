"""The tables of `thinwire plan`: predicted costs for one or more networks, or compared with measurements."""

import statistics
from collections.abc import Collection
from typing import Any

from thinwire.errors import OptionError, StateError
from thinwire.plan.compute import Measured
from thinwire.plan.network import Network
from thinwire.plan.planner import Row
from thinwire.plan.recommend import Recommendation
from thinwire.plan.text import (
    DEVICE,
    DEVICE_LEGEND,
    LEGEND,
    TIME,
    TRADE,
    Lines,
    as_data,
    device_of,
    sources,
    time_of,
    trade_of,
)
from thinwire.plan.units import show_bytes, show_seconds
from thinwire.telemetry.log import Log
from thinwire.tools.bench.load import Timing
from thinwire.tools.bench.parsing import attach_line
from thinwire.tools.bench.predict import TERMS, Prediction, predict, predict_log
from thinwire.tools.bench.results import Results
from thinwire.tools.cli.output import err, out, print_json, text_table
from thinwire.tools.cli.plan_request import Request, measure_workload, say_left_out

SIZES = ("plain DDP", "bytes", "computing", "step", "speed-up", "bytes", "computing", "use", "or")

Plan = tuple[Network, list[Row], Recommendation]
Checks = dict[str, list[Prediction]]
"""Predictions by the name of the measurement."""


def lines_of(advice: Recommendation) -> Lines:
    """Return the lines of Python that follow a recommendation and its alternative, None for plain DDP."""
    best, other = (
        attach_line(row.candidate.text) if row else None for row in (advice.row, advice.alternative)
    )
    return best, other


def show_plan(rows: list[Row], advice: Recommendation, timing: Timing, *, as_json: bool) -> None:
    """Print the plan for one network."""
    if as_json:
        print_json({**as_data(rows, advice, lines_of(advice)), "timing": timing.as_data()})
        return
    out.print()
    _print_table(TIME, [time_of(row) for row in rows], rows, advice)
    _print_table(TRADE, [trade_of(row) for row in rows], rows, advice)
    _print_advice(advice)
    out.print(str(timing), style="bold" if timing.busy else "")
    _print_legend(rows, LEGEND)


def show_device_plan(
    rows: list[Row], terms: list[dict[str, float]], advice: Recommendation, note: str, *, as_json: bool
) -> None:
    """Print the plan for a device that is not at hand.

    Args:
        rows: The plan of every candidate.
        terms: The terms of each row on the device.
        advice: The recommendation.
        note: A text which says that the plan is not measured.
        as_json: Whether to print JSON.
    """
    if as_json:
        found = as_data(rows, advice, lines_of(advice))
        for row, more in zip(found["rows"], terms, strict=True):
            # The error of the formula was never measured on a GPU, so there is no interval.
            row.update(more, low=None, high=None)
        print_json({**found, "measured": False, "note": note})
        return
    out.print()
    figures = [device_of(row, more) for row, more in zip(rows, terms, strict=True)]
    _print_table(DEVICE, figures, rows, advice)
    _print_table(TRADE, [trade_of(row) for row in rows], rows, advice)
    _print_advice(advice)
    out.print(note, style="bold")
    _print_legend(rows, DEVICE_LEGEND)


def _print_table(
    columns: tuple[str, ...], figures: list[list[str]], rows: list[Row], advice: Recommendation
) -> None:
    shown = [(row.candidate.name, texts, row is advice.row) for row, texts in zip(rows, figures, strict=True)]
    out.print(text_table(columns, shown), "", soft_wrap=False)


def _print_advice(advice: Recommendation) -> None:
    out.print(advice.text, style="bold")
    line, other = lines_of(advice)
    if line:
        out.print(f"\n    {line}", style="bold")
    if other:
        out.print(f"    {other}  # the alternative")
    out.print()


def _print_legend(rows: list[Row], legend: str) -> None:
    for source in sources(rows):
        err.print(f"loss gaps of {source}", style="dim")
    err.print(legend, style="dim")


def show_sizes(plans: list[Plan], timing: Timing, note: str | None = None, *, as_json: bool) -> None:
    """Print one line for each world size: plain DDP and the recommendation.

    Args:
        plans: The plan of each world size.
        timing: The circumstances of the measurements.
        note: A text which says that the plans are not measured, in place of `timing`. None if they are.
        as_json: Whether to print JSON.
    """
    how = {"timing": timing.as_data()} if note is None else {"measured": False, "note": note}
    if as_json:
        found: list[dict[str, Any]] = [
            {"hosts": network.ranks, **as_data(rows, advice, lines_of(advice)), **how}
            for network, rows, advice in plans
        ]
        print_json(found)
        return
    lines = []
    for network, rows, advice in plans:
        best = advice.row or rows[0]
        figures = [*_size_of(rows[0]), *_size_of(best)]
        figures.insert(4, f"{best.speed_up:.2f} x")
        other = advice.alternative
        also = f"{other.candidate.name} {other.speed_up:.2f} x" if other else "-"
        lines.append((f"{network.ranks} hosts", [*figures, best.candidate.name, also], False))
    out.print()
    out.print(text_table(SIZES, lines), "", soft_wrap=False)
    out.print(note or str(timing), style="bold" if note or timing.busy else "")
    err.print(
        "computing: the share of a step that is not communication. The second bytes and computing are those"
        " of the program to use. or: averaged models that are faster still, and change training more.",
        style="dim",
    )


def _size_of(row: Row) -> list[str]:
    return [show_seconds(row.cost.step), show_bytes(row.cost.bytes), f"{row.cost.utilisation:.0%}"]


def check_results(results: Results, model: str | None, named: Collection[str]) -> Checks:
    """Return the predictions for all cells of a results file.

    Args:
        results: The results.
        model: The model that the user named. The code of another one is not imported.
        named: The programs that the user named. The code of others is not imported.

    Raises:
        StateError: No cell has measurements.
        OptionError: The results are of code that the user did not name.
    """
    models: dict[str, Measured] = {}
    found: Checks = {}
    cores = int(results.machine.get("cores", "1"))
    for cell in results.cells:
        if cell.error is not None:
            continue
        if ":" in cell.workload and cell.workload != model:
            raise OptionError(
                f"the results are of the model {cell.workload!r}, and a file may not choose code to run: if"
                f" it is yours, pass --model {cell.workload}"
            )
        if cell.workload not in models:
            models[cell.workload] = measure_workload(cell.workload)
        name = f"{cell.workload}, {cell.network}"
        found[name] = predict(cell, models[cell.workload], cores, named=named)
    say_left_out(results, named)
    if not found:
        raise StateError("the results file has no cell with measurements: run thinwire bench again")
    return found


def check_log(request: Request, log: Log) -> Prediction:
    """Return the prediction for a training log.

    Raises:
        OptionError: The options do not name exactly one program.
    """
    candidates = request.candidates() if request.programs else []
    if len(candidates) != 1:
        raise OptionError("pass --programs: a check of a log needs the program that ran, as --programs Int8")
    network = request.network(log.world_size) if request.hosts is None else request.networks()[0]
    return predict_log(log, request.planner(network.ranks), candidates[0], network)


def show_checks(checks: Checks, *, as_json: bool) -> None:
    """Print predicted and measured terms, and the errors of steps."""
    if as_json:
        print_json({name: [_data(prediction) for prediction in found] for name, found in checks.items()})
        return
    for name, found in checks.items():
        out.print(f"\n{name}\n", style="bold")
        lines = [
            (prediction.name, [_pair(prediction, term) for term in TERMS], False) for prediction in found
        ]
        out.print(text_table(TERMS, lines), "", soft_wrap=False)
    errors = [
        abs(error)
        for found in checks.values()
        for prediction in found
        if (error := prediction.error()) is not None
    ]
    if errors:
        out.print(
            f"error of steps: median {statistics.median(errors):.0%}, worst {max(errors):.0%} of"
            f" {len(errors)}",
            style="bold",
        )
    err.print("each: predicted / measured (error)", style="dim")


def _pair(prediction: Prediction, term: str) -> str:
    predicted, measured, error = (
        getattr(prediction.predicted, term),
        prediction.measured.get(term),
        prediction.error(term),
    )
    show = show_bytes if term == "bytes" else show_seconds
    if measured is None or error is None:
        return f"{show(predicted)} / -"
    return f"{show(predicted)} / {show(measured)} ({error:+.0%})"


def _data(prediction: Prediction) -> dict[str, Any]:
    return {
        "name": prediction.name,
        "predicted": {term: getattr(prediction.predicted, term) for term in TERMS},
        "measured": dict(prediction.measured),
        "error": prediction.error(),
    }
