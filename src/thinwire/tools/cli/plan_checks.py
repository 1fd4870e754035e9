"""The checks of `thinwire plan`: predictions beside measurements, term by term."""

import statistics
from collections.abc import Collection
from typing import Any

from thinwire.errors import OptionError, StateError
from thinwire.plan.compute import Measured
from thinwire.plan.units import show_bytes, show_seconds
from thinwire.telemetry.log import Log
from thinwire.tools.bench.predict import TERMS, Prediction, predict, predict_log
from thinwire.tools.bench.results import Results
from thinwire.tools.cli.output import err, out, print_json
from thinwire.tools.cli.plan_request import Request, measure_workload, say_left_out
from thinwire.tools.cli.table import text_table

Checks = dict[str, list[Prediction]]
"""Predictions by the name of what was measured."""


def check_results(results: Results, model: str | None, named: Collection[str]) -> Checks:
    """Return the predictions for all cells of a results file.

    Args:
        results: The results.
        model: The model that the user named. Another one that is code is not imported.
        named: The programs that the user named. Others that are code are not imported.

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
        OptionError: The options name no single program, which a log does not tell.
    """
    candidates = request.candidates() if request.programs else []
    if len(candidates) != 1:
        raise OptionError("check of a log needs the program that ran: give one, as --programs Int8")
    ranks = log.world_size
    if request.hosts is None and ranks is None:
        raise OptionError("hosts is missing, and the log does not tell: give --hosts")
    network = request.network(ranks) if request.hosts is None and ranks else request.networks()[0]
    return predict_log(log, request.planner(network.ranks), candidates[0], network)


def show_checks(checks: Checks, *, as_json: bool) -> None:
    """Print predicted and measured terms, and the errors of steps."""
    if as_json:
        print_json({name: [_data(one) for one in found] for name, found in checks.items()})
        return
    for name, found in checks.items():
        out.print(f"\n{name}\n", style="bold")
        lines = [(one.name, [_pair(one, term) for term in TERMS], False) for one in found]
        out.print(text_table(TERMS, lines), "", soft_wrap=False)
    errors = [abs(error) for found in checks.values() for one in found if (error := one.error()) is not None]
    if errors:
        out.print(
            f"error of steps: median {statistics.median(errors):.0%}, worst {max(errors):.0%} of"
            f" {len(errors)}",
            style="bold",
        )
    err.print("each: predicted / measured (error)", style="dim")


def _pair(one: Prediction, term: str) -> str:
    predicted, measured, error = getattr(one.predicted, term), one.measured.get(term), one.error(term)
    show = show_bytes if term == "bytes" else show_seconds
    if measured is None or error is None:
        return f"{show(predicted)} / -"
    return f"{show(predicted)} / {show(measured)} ({error:+.0%})"


def _data(one: Prediction) -> dict[str, Any]:
    return {
        "name": one.name,
        "predicted": {term: getattr(one.predicted, term) for term in TERMS},
        "measured": dict(one.measured),
        "error": one.error(),
    }
