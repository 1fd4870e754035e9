"""A small drawing of a page's neighbours: importers on the left, imports on the right."""

from html import escape

_ROW, _WIDTH, _BOX, _GAP, _MOST = 30, 760, 210, 65, 8


def neighbours(name: str, importers: dict[str, str], imported: dict[str, str]) -> str:
    """Return an SVG of a module between those that import it and those that it imports.

    Args:
        name: The module in the middle.
        importers: Link of each module on the left.
        imported: Link of each module on the right.
    """
    left, right = _column(importers), _column(imported)
    height = _ROW * max(len(left), len(right), 1) + 36
    middle = 18 + (height - 36) / 2
    parts = [
        f'<svg class="neighbours" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(f"{len(importers)} importers and {len(imported)} imports of {name}")}">'
    ]
    if left:
        parts.append(f'<text class="head" x="{_BOX / 2}" y="12">imported by</text>')
    if right:
        parts.append(f'<text class="head" x="{_WIDTH - _BOX / 2}" y="12">imports</text>')
    centre = (_WIDTH - _BOX) / 2
    for label, link, y in _placed(left, height):
        parts += [_line(_BOX, y, centre, middle), _box(0, y, label, link)]
    for label, link, y in _placed(right, height):
        parts += [_line(centre + _BOX, middle, _WIDTH - _BOX, y), _box(_WIDTH - _BOX, y, label, link)]
    parts.append(_box(centre, middle, name, "", extra=" here"))
    return "".join([*parts, "</svg>"])


def _column(links: dict[str, str]) -> list[tuple[str, str]]:
    listed = sorted(links.items())
    if len(listed) <= _MOST:
        return listed
    return [*listed[: _MOST - 1], (f"and {len(listed) - _MOST + 1} more", "#dependencies")]


def _placed(column: list[tuple[str, str]], height: float) -> list[tuple[str, str, float]]:
    top = 18 + (height - 36 - _ROW * len(column)) / 2
    return [(label, link, top + _ROW * (row + 0.5)) for row, (label, link) in enumerate(column)]


def _box(x: float, y: float, label: str, link: str, extra: str = "") -> str:
    short = label if len(label) <= 30 else f"…{label[-29:]}"
    drawn = (
        f'<g class="box{extra}" aria-label="{escape(label)}">'  # a <title> breaks Sphinx's highlighting
        f'<rect x="{x + 1:.0f}" y="{y - 12:.0f}" width="{_BOX - 2}" height="24" rx="5"/>'
        f'<text x="{x + _BOX / 2:.0f}" y="{y + 4:.0f}">{escape(short)}</text></g>'
    )
    return f'<a href="{escape(link)}">{drawn}</a>' if link else drawn


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    bend = (x1 + x2) / 2
    return f'<path d="M{x1:.0f},{y1:.0f} C{bend:.0f},{y1:.0f} {bend:.0f},{y2:.0f} {x2:.0f},{y2:.0f}"/>'
