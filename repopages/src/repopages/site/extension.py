"""The Sphinx extension: the Markdown parser, definitions as objects, and all that is put into finished pages.

Listings, drawings and navigation never pass through docutils, so that they cost little and are not searched.
The build answers the event `NAVIGATION` with the site's `Navigation`, which Sphinx must not pickle.
"""

import hashlib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from repopages import __version__
from repopages.pages.drawing import folder_graph, graph_of, svg
from repopages.site.addresses import START, Site
from repopages.site.dialect import GRAPH, SOURCE
from repopages.site.listings import listing
from repopages.site.markdown import GitHubParser
from repopages.site.navigation import NAVIGATION, Navigation
from repopages.site.objects import Definitions, note_definitions


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension to Sphinx."""
    app.add_source_suffix(".md", "markdown")
    app.add_source_parser(GitHubParser)
    app.add_domain(Definitions)
    app.add_event(NAVIGATION)
    app.connect("doctree-read", _read)
    app.connect("html-page-context", _before_furo, priority=400)
    app.connect("html-page-context", _after_furo, priority=600)
    return {
        "version": __version__,
        "env_version": _version(),
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }


def _version() -> int:
    """Return a number that changes with the code here: Sphinx then reads all pages again."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return int(found.hexdigest()[:12], 16)


def _read(app: Sphinx, doctree: nodes.document) -> None:
    """Register what a page defines, and title a document that begins without a heading."""
    navigation: Navigation = app.emit_firstresult(NAVIGATION)
    site, page = navigation.site, app.env.docname
    if page in site.file_of:
        note_definitions(app.env, site.library, site.library.files[site.file_of[page]])
    if page in site.document_of:
        title = navigation.title(site.document_of[page])
        app.env.titles[page] = app.env.longtitles[page] = nodes.title("", title)


def _before_furo(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    context["toctree"] = lambda **_: ""  # furo would ask for a tree of all pages, on every page


def _after_furo(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    navigation: Navigation = app.emit_firstresult(NAVIGATION)
    site = navigation.site
    context["furo_navigation_tree"] = navigation.sidebar(page)
    if "body" not in context:  # the search page
        return
    body: str = context["body"]
    if page in site.file_of:
        body = body.replace(SOURCE, listing(site.library.files[site.file_of[page]]), 1)
    if GRAPH in body:
        body = body.replace(GRAPH, _drawing(site, page), 1)
    end = navigation.contents() if page == START else ""
    context["body"] = navigation.breadcrumbs(page) + body + end


def _drawing(site: Site, page: str) -> str:
    if page in site.file_of:
        graph = graph_of(site.library, site.dialect, site.file_of[page])
    elif page in site.folder_of:
        graph = folder_graph(site.library, site.dialect, site.folder_of[page])
    else:
        graph = None
    return svg(graph) if graph is not None else ""
