"""The Sphinx extension: the Markdown parser, definitions as objects, and all that is put into finished pages.

Listings, drawings and navigation never pass through docutils, so that they cost little and are not searched.
The build sets `app.repopages` to the `Site`.
"""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from repopages import __version__
from repopages.pages.drawing import graph
from repopages.site.addresses import FILES, START, Site
from repopages.site.inert import GRAPH, SOURCE
from repopages.site.listings import listing
from repopages.site.markdown import GitHubParser
from repopages.site.navigation import Navigation
from repopages.site.objects import Definitions, note_definitions


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension to Sphinx."""
    app.add_source_suffix(".md", "markdown")
    app.add_source_parser(GitHubParser)
    app.add_domain(Definitions)
    app.connect("doctree-read", _read)
    app.connect("html-page-context", _before_furo, priority=400)
    app.connect("html-page-context", _after_furo, priority=600)
    return {"version": __version__, "parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Sphinx, doctree: nodes.document) -> None:
    """Register what a page defines, and title a document that has no heading."""
    site: Site = app.repopages
    page = app.env.docname
    path = site.navigation.file(page)
    if path is not None:
        note_definitions(app.env, site.library, site.library.files[path])
    if page in site.document_of:
        title = nodes.title("", site.navigation.title(site.document_of[page]))
        app.env.titles[page] = app.env.longtitles[page] = title


def _before_furo(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    context["toctree"] = lambda **_: ""  # furo would ask for a tree of all pages, on every page


def _after_furo(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    site: Site = app.repopages
    context["furo_navigation_tree"] = site.navigation.sidebar(page)
    if "body" not in context:  # the search page
        return
    body: str = context["body"]
    if page.startswith(f"{FILES}/"):
        path = site.navigation.file(page)
        source = listing(site.library.files[path]) if path is not None else ""
        drawn = graph(site.library, path if path is not None else site.navigation.folder(page) or "")
        body = body.replace(SOURCE, source, 1).replace(GRAPH, drawn, 1)
    end = site.navigation.contents() if page == START else ""
    context["body"] = site.navigation.breadcrumbs(page) + body + end
