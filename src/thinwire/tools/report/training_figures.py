"""The plots of a training log by step. In long logs a point represents many steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from thinwire.engine.meter import GRADIENTS, MODELS, PARAMETERS
from thinwire.telemetry.log import Log, Series
from thinwire.tools.report.frame import COLOURS, GREY, Figure, line
from thinwire.tools.report.training_summary import Event

_POINTS = 600
_DOTS = 80  # a line with more points is drawn without dots
_SPREAD = 30  # from this ratio on, an axis of bytes or errors is logarithmic
_WORST = 4
_TURNS = 50
_MOST_LOGGED = 8
_ORDER = (GRADIENTS, MODELS, PARAMETERS)
_BLUE, _RED, _GREEN, _PINK, _AMBER, _SKY, *_ = COLOURS
_BUSY = dict(zip(_ORDER, (_BLUE, _GREEN, _AMBER), strict=True))
_WAITING = dict(zip(_ORDER, (_RED, _PINK, _SKY), strict=True))

Points = tuple[list[Any], list[Any]]
Choice = Callable[[Sequence[int], Sequence[float]], tuple[int, float]]


def figures(log: Log, events: Sequence[Event]) -> dict[str, Figure]:
    """Return all plots by title, over the same steps.

    Dotted lines mark the audits after which a program was replaced or training stopped.
    """
    drawn = {_title(name): logged_by_step(log, name) for name in _names(log)}
    drawn["Bytes sent"] = bytes_by_step(log)
    if any(second > 0 for series in log.series.values() for second in series.wire):  # NaN > 0 is false
        drawn["Time on the network"] = seconds_by_step(log)
    if log.audits:
        drawn["Error of the mean"] = error_by_step(log, events)
        drawn["Residual"] = residual_by_step(log)
    turns = [audit.step for event in events for audit in event.audits if audit.action != "warned"]
    upright = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    dotted = {"color": _RED, "dash": "dot", "width": 1}
    first = min(min(series.steps) for series in log.series.values())
    last = max(max(series.steps) for series in log.series.values())
    margin = max(0.02 * (last - first), 0.5)
    shapes = [{**upright, "x0": step, "x1": step, "line": dotted} for step in turns[:_TURNS]]
    for figure in drawn.values():
        figure["layout"]["xaxis"]["range"] = [first - margin, last + margin]
        figure["layout"]["shapes"] = shapes
    return drawn


def _names(log: Log) -> list[str]:
    """Return the names of logged values that are drawn, the loss first."""
    return sorted(log.logged, key=lambda name: name != "loss")[:_MOST_LOGGED]


def _title(name: str) -> str:
    return name[:1].upper() + name[1:]


def logged_by_step(log: Log, name: str) -> Figure:
    """Draw a value that the training loop logged."""
    logged = log.logged[name]
    data = [_drawn(name, _thin(logged.steps, logged.values, _mean), _BLUE, "%{y:.5g} at step %{x}")]
    axis = {"title": {"text": name, "standoff": 12}, "tickformat": "~g"}
    return _figure(data, axis, _bunch(logged.steps), "mean")


def bytes_by_step(log: Log) -> Figure:
    """Draw the bytes of programs, and of audited steps, which also send the exact mean."""
    lines, dots, most = [], [], 1
    for purpose, series in _sorted(log):
        if any(series.own):
            most = max(most, _bunch(series.steps))
            points, colour = _thin(series.steps, series.own, _mean), _BUSY.get(purpose, GREY)
            lines.append(_drawn(purpose, points, colour, "%{y:.3s}B at step %{x}"))
        audited = [place for place, count in enumerate(series.audit) if count]
        if audited:
            steps = [series.steps[place] for place in audited]
            totals = [series.own[place] + series.audit[place] for place in audited]
            points, hover = _thin(steps, totals, _largest), "%{y:.3s}B at step %{x}"
            dots.append(_marked(f"{purpose}, audited", points, _RED, "diamond", hover))
    axis = _axis("bytes per step", [*lines, *dots]) | {"tickformat": "~s"}
    return _figure([*lines, *dots], axis, most, "mean")


def seconds_by_step(log: Log) -> Figure:
    """Draw the time with a collective in flight, and the time that backward waited."""
    data, most = [], 1
    for purpose, series in _sorted(log):
        columns = (("in flight", series.wire, _BUSY), ("exposed", series.exposed, _WAITING))
        for name, column, colours in columns:
            if any(second > 0 for second in column):
                most = max(most, _bunch(series.steps))
                title = name if purpose == GRADIENTS else f"{purpose}, {name}"
                points = _thin(series.steps, column, _mean)
                data.append(_drawn(title, points, colours.get(purpose, GREY), "%{y:.3s}s at step %{x}"))
    axis = _axis("time per step", data, may_be_log=False) | {"tickformat": "~s", "ticksuffix": "s"}
    return _figure(data, axis, most, "mean")


def error_by_step(log: Log, events: Sequence[Event]) -> Figure:
    """Draw the error of all gradients, of the parameters with the largest errors, and the actions taken."""
    hover = "%{y:.3g} at step %{x}"
    steps = [audit.step for audit in log.audits]
    data = []
    worst = sorted(log.parameters, key=lambda name: max(log.parameters[name].errors), reverse=True)[:_WORST]
    for name, colour in zip(worst, (_AMBER, _GREEN, _PINK, _SKY), strict=False):
        parameter = log.parameters[name]
        drawn = _drawn(name, _thin(parameter.steps, parameter.errors, _largest), colour, hover)
        drawn["line"] |= {"width": 1}
        data.append(drawn)
    together = _drawn(
        "all together", _thin(steps, [audit.error for audit in log.audits], _largest), _BLUE, hover
    )
    together["line"] |= {"width": 3}
    data += [together, *_acted(events)]
    return _figure(data, _axis("relative error", data), _bunch(steps), "largest")


def residual_by_step(log: Log) -> Figure:
    """Draw the norm of the residuals of error feedback. It levels off in sound training."""
    steps = [audit.step for audit in log.audits]
    points = _thin(steps, [audit.residual for audit in log.audits], _largest)
    data = [_drawn("residual", points, _BLUE, "%{y:.3g} at step %{x}")]
    axis = _axis("norm of all ranks' residuals", data, may_be_log=False)
    return _figure(data, axis, _bunch(steps), "largest")


def _acted(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Mark the audits that led to an action, at the error of the worst parameter."""
    drawn: dict[str, dict[str, Any]] = {}
    for event in events:
        steps = [audit.step for audit in event.audits]
        points = _thin(steps, [audit.worst_error for audit in event.audits], _largest)
        name = event.audits[0].action
        if name in drawn:
            for known, more in zip((drawn[name]["x"], drawn[name]["y"]), points, strict=True):
                known += more
        else:
            drawn[name] = _marked(name, points, _RED, "x", "worst %{y:.3g} at step %{x}")
    return list(drawn.values())


def _figure(data: list[dict[str, Any]], axis: dict[str, Any], bunch: int, what: str) -> Figure:
    title = "step" if bunch == 1 else f"step (a point is the {what} of up to {bunch:,})"
    return {"data": data, "layout": {"xaxis": {"title": {"text": title}}, "yaxis": axis}}


def _axis(title: str, data: list[dict[str, Any]], *, may_be_log: bool = True) -> dict[str, Any]:
    """Return an axis that starts at zero, or a logarithmic one if values differ widely."""
    values = [value for trace in data for value in trace["y"] if value and math.isfinite(value)]
    spread = max(values) / min(values) if values and may_be_log else 1
    axis: dict[str, Any] = {"title": {"text": title, "standoff": 12}, "tickformat": "~g"}
    ticks = "D2" if spread < _SPREAD**2 else 1  # 1, 2 and 5 of each power of ten, or just these
    axis |= {"type": "log", "dtick": ticks} if spread > _SPREAD else {"rangemode": "tozero"}
    return axis


def _drawn(name: str, points: Points, colour: str, hover: str) -> dict[str, Any]:
    drawn = line(name, *points, colour, hover=hover)
    return drawn | {"mode": "lines" if len(points[0]) > _DOTS else "lines+markers"}


def _marked(name: str, points: Points, colour: str, symbol: str, hover: str) -> dict[str, Any]:
    drawn, size = line(name, *points, colour, hover=hover), 7 if len(points[0]) <= _DOTS else 5
    return drawn | {"mode": "markers", "marker": {"size": size, "symbol": symbol, "color": colour}}


def _sorted(log: Log) -> Iterator[tuple[str, Series]]:
    for purpose in (*_ORDER, *sorted(log.series.keys() - {*_ORDER})):
        if purpose in log.series:
            yield purpose, log.series[purpose]


def _bunch(steps: Sequence[int]) -> int:
    """Return the number of steps that a point represents."""
    return max(1, math.ceil(len(steps) / _POINTS))


def _thin(steps: Sequence[int], values: Sequence[float], choice: Choice) -> Points:
    """Return one point for each bunch of steps. The line is broken where training was resumed."""
    size, shown = _bunch(steps), ([], [])  # type: tuple[int, Points]
    for start in range(0, len(steps), size):
        step, value = choice(steps[start : start + size], values[start : start + size])
        if shown[0] and shown[0][-1] > step:
            shown[0].append(None)
            shown[1].append(None)
        shown[0].append(step)
        shown[1].append(value)
    return shown


def _mean(steps: Sequence[int], values: Sequence[float]) -> tuple[int, float]:
    known = [value for value in values if not math.isnan(value)]
    return steps[len(steps) // 2], sum(known) / len(known) if known else math.nan


def _largest(steps: Sequence[int], values: Sequence[float]) -> tuple[int, float]:
    value = max(values)
    return steps[list(values).index(value)], value
