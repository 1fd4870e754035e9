"""The plots of a benchmark."""

from typing import Any

from thinwire.tools.bench.results import Cell, Track
from thinwire.tools.bench.summary import Row, curve, rows
from thinwire.tools.bench.text import plain_name
from thinwire.tools.report.frame import COLOURS, GREY, Figure, line

_FAR = 10
"""The ratio between the longest and the shortest curve from which an axis is logarithmic."""


class Palette:
    """The colours of a page, one for each program. torch's hook shares its program's colour."""

    def __init__(self, cells: list[Cell]) -> None:
        texts = dict.fromkeys(
            track.text for cell in cells for track in cell.tracks if track.kind == "thinwire"
        )
        self._by_text = {text: COLOURS[number % len(COLOURS)] for number, text in enumerate(texts)}

    def colour(self, track: Track | Row, text: str) -> str:
        """Return the colour of a contestant. Plain DDP is grey.

        Args:
            track: The contestant.
            text: Its program, as the user wrote it.
        """
        return GREY if track.kind == "ddp" else self._by_text.get(text, GREY)


def loss_by_time(cell: Cell, palette: Palette) -> Figure:
    """Draw the loss of each contestant against its wall time."""
    return _losses(cell, palette, 0, 1.0, "seconds of training")


def loss_by_bytes(cell: Cell, palette: Palette) -> Figure:
    """Draw the loss of each contestant against the bytes that a rank sent."""
    return _losses(cell, palette, 1, 1e-6, "MB sent by each rank")


def _losses(cell: Cell, palette: Palette, column: int, scale: float, title: str) -> Figure:
    data = []
    for track in _racing(cell):
        points = curve(track)
        dash = "dash" if track.kind == "torch" else "solid"
        width = 7 if track.kind == "ddp" else 2  # wide and below, so that equal curves stay visible
        drawn = line(
            plain_name(track),
            [scale * point[column] for point in points],
            [point[2] for point in points],
            palette.colour(track, track.text),
            hover="%{y:.4f} at %{x:.3g}",
        )
        drawn["line"] |= {"dash": dash, "width": width}
        data.append(drawn)
    ends = [max(drawn["x"], default=0.0) for drawn in data]
    far_apart = ends and max(ends) > _FAR * min(ends)
    for drawn in data if far_apart else ():
        seen = [(x, y) for x, y in zip(drawn["x"], drawn["y"], strict=True) if x > 0]  # no logarithm of zero
        drawn["x"], drawn["y"] = [x for x, _ in seen], [y for _, y in seen]
    return {
        "data": data,
        "layout": {
            "xaxis": {
                "title": {"text": title},
                **({"type": "log"} if far_apart else {"rangemode": "tozero"}),
            },
            "yaxis": {"title": {"text": "held-out loss"}},
        },
    }


def step_breakdown(cell: Cell) -> Figure:
    """Draw the components of each contestant's step time, and the floors for the bytes that it sends."""
    shown = [row for row in rows(cell) if row.step is not None][::-1]
    parts = (
        ("computing", "#009e73", [row.compute or 0.0 for row in shown]),
        ("encoding and other overhead", "#e69f00", [row.overhead or 0.0 for row in shown]),
        ("waiting for the network", "#d55e00", [row.waiting or 0.0 for row in shown]),
    )
    names = [plain_name(row) for row in shown]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": [1e3 * second for second in seconds],
            "marker": {"color": colour},
            "hovertemplate": f"%{{x:.1f}} ms<extra>{name}</extra>",
        }
        for name, colour, seconds in parts
    ]
    data += [
        _marks("floor", names, [row.floor for row in shown], "#000000"),
        _marks("link floor", names, [row.link_floor for row in shown], "#56b4e9"),
        _marks("core floor", names, [row.core_floor for row in shown], "#cc79a7"),
    ]
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "ms per step"}}, "yaxis": {"automargin": True}}
    return {"data": data, "layout": layout}


def _marks(name: str, names: list[str], seconds: list[float | None], colour: str) -> dict[str, Any]:
    """Return plotly's description of upright marks on the bars of `step_breakdown`."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "y": names,
        "x": [None if second is None else 1e3 * second for second in seconds],
        "marker": {"symbol": "line-ns-open", "size": 22, "color": colour, "line": {"width": 3}},
        "hovertemplate": f"%{{x:.1f}} ms<extra>{name}</extra>",
    }


def speed_up_by_link(cells: list[Cell], palette: Palette) -> Figure:
    """Draw the speed-up over plain DDP on each network. Whiskers are quartiles."""
    names = dict.fromkeys(
        (track.name, track.text) for cell in cells for track in _racing(cell) if track.kind != "ddp"
    )
    data = []
    for name, text in names:
        found = [(cell, row) for cell in cells for row in rows(cell) if row.name == name and row.speed_up]
        bounds = [row.speed_up for _, row in found if row.speed_up]
        pattern = {"shape": "/"} if found[0][1].kind == "torch" else {}
        data.append(
            {
                "type": "bar",
                "name": plain_name(found[0][1]),
                "x": [cell.network for cell, _ in found],
                "y": [middle for _, middle, _ in bounds],
                "error_y": {
                    "type": "data",
                    "array": [high - middle for _, middle, high in bounds],
                    "arrayminus": [middle - low for low, middle, _ in bounds],
                    "color": GREY,
                    "thickness": 1,
                },
                "marker": {"color": palette.colour(found[0][1], text), "pattern": pattern},
                "hovertemplate": f"%{{y:.2f}} x<extra>{plain_name(found[0][1])}</extra>",
            }
        )
    even = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": 1,
        "y1": 1,
        "line": {"color": GREY, "dash": "dot"},
    }
    axis = {"title": {"text": "speed-up over plain DDP"}, "rangemode": "tozero"}
    return {"data": data, "layout": {"barmode": "group", "shapes": [even], "yaxis": axis}}


def _racing(cell: Cell) -> list[Track]:
    return [track for track in cell.tracks if track.kind != "alone" and not track.unavailable]
