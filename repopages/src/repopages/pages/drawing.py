"""A small drawing of neighbours: importers on the left, imports on the right."""

import posixpath
from collections.abc import Callable, Iterator
from html import escape

from repopages.pages.addresses import file_page, folder_page, relative
from repopages.pages.dialect import Dialect, Graph
from repopages.pages.markup import shown
from repopages.relations.library import Library

_ROW, _WIDTH, _BOX, _MOST = 30, 760, 210, 8


def graph_of(library: Library, dialect: Dialect, path: str) -> Graph | None:
    """Return the neighbours of a file, or None if it has none."""
    left = {edge.source for edge in library.importers(path)} - {path}
    right = {edge.target for edge in library.imports(path)} - {path}
    return _graph(dialect, path, left, right, file_page)


def folder_graph(library: Library, dialect: Dialect, folder: str) -> Graph | None:
    """Return the folders that import from a folder and those that it imports from, or None without any.

    All files below a folder count as the folder.
    """
    left, right = set[str](), set[str]()
    for path in files_below(library, folder):
        left |= {beside(edge.source, folder) for edge in library.importers(path)}
        right |= {beside(edge.target, folder) for edge in library.imports(path)}
    return _graph(dialect, folder, left - {folder}, right - {folder}, folder_page)


def files_below(library: Library, folder: str) -> Iterator[str]:
    """Yield the files in a folder and in all folders below it."""
    yield from library.folders[folder].files
    for inner in library.folders[folder].folders:
        yield from files_below(library, inner)


def beside(path: str, folder: str) -> str:
    """Return the folder of a file on the level where its path leaves that of `folder`."""
    if not folder or path.startswith(f"{folder}/"):
        return folder
    here, there = folder.split("/"), path.split("/")[:-1]
    common = next(
        (depth for depth, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]),
        min(len(here), len(there)),
    )
    return "/".join(there[: common + 1])


def _graph(
    dialect: Dialect, path: str, left: set[str], right: set[str], address: Callable[[str], str]
) -> Graph | None:
    if not left and not right:
        return None
    # Labels are short: without the folders that all of them have in common.
    shared = posixpath.commonpath([posixpath.dirname(name) for name in (path, *left, *right)])
    here = dialect.top + address(path)

    def boxes(names: set[str]) -> tuple[tuple[str, str], ...]:
        listed = sorted(names)
        kept = listed if len(listed) <= _MOST else listed[: _MOST - 1]
        made = [
            (_label(name, shared), relative(here, dialect.top + address(name) + dialect.suffix))
            for name in kept
        ]
        more = len(listed) - len(kept)
        rest = "#dependencies" if address is file_page else ""  # the page of a folder lists no imports
        return (*made, (f"and {more} more", rest)) if more else tuple(made)

    return Graph(path=path, name=_label(path, shared), left=boxes(left), right=boxes(right))


def _label(name: str, shared: str) -> str:
    return shown(posixpath.relpath(name, shared) if shared and name else name or "the root")


def svg(graph: Graph) -> str:
    """Return the drawing of a graph, with links."""
    left, right = graph.left, graph.right
    height = _ROW * max(len(left), len(right), 1) + 36
    middle = 18 + (height - 36) / 2
    label = escape(f"{len(left)} importers and {len(right)} imports of {graph.name}")
    parts = [f'<svg class="neighbours" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">']
    if left:
        parts.append(f'<text class="head" x="{_BOX / 2}" y="12">imported by</text>')
    if right:
        parts.append(f'<text class="head" x="{_WIDTH - _BOX / 2}" y="12">imports</text>')
    centre = (_WIDTH - _BOX) / 2
    for label, link, y in _placed(left, height):
        parts += [_line(_BOX, y, centre, middle), _box(0, y, label, link)]
    for label, link, y in _placed(right, height):
        parts += [_line(centre + _BOX, middle, _WIDTH - _BOX, y), _box(_WIDTH - _BOX, y, label, link)]
    parts.append(_box(centre, middle, graph.name, "", extra=" here"))
    return "".join([*parts, "</svg>"])


def _placed(column: tuple[tuple[str, str], ...], height: float) -> list[tuple[str, str, float]]:
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
