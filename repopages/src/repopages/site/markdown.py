"""The Markdown that Sphinx reads: GitHub's, without directives or roles, and with inert HTML.

MyST's own parser applies a document's front matter, by which a document could enable directives, which read
files. The parser here has no directives, whatever a document says.
"""

import posixpath
import re
from collections.abc import Sequence
from html import escape, unescape
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from mdit_py_plugins.footnote import footnote_plugin
from mdit_py_plugins.front_matter import front_matter_plugin
from mdit_py_plugins.gfm_autolink import gfm_autolink_plugin
from myst_parser.config.main import MdParserConfig
from myst_parser.mdit_to_docutils.sphinx_ import SphinxRenderer
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.transforms import SphinxTransform

from repopages.pages.addresses import relative
from repopages.reading.model import Section
from repopages.site.addresses import PICTURES, Site
from repopages.site.inert import Inert, scheme
from repopages.site.navigation import NAVIGATION

_CONFIGURATION = MdParserConfig(gfm_only=True, heading_anchors=6)


class _Renderer(SphinxRenderer):
    """MyST's renderer, which leaves front matter out."""

    def render_front_matter(self, token: object) -> None:
        """Write nothing. MyST would apply it."""


class _QuickRenderer(_Renderer):
    """A renderer of the pages that repopages wrote.

    Tables and lists are most of such a page. As nodes of docutils, each cell costs a millisecond.
    """

    def render_table(self, token: Any) -> None:
        """Add a table as HTML, with the classes that Sphinx and furo give it."""
        table = self._html(token).replace("<table>", '<table class="docutils align-default">', 1)
        self.current_node.append(_raw(f'<div class="table-wrapper docutils container">{table}</div>'))

    def render_bullet_list(self, token: Any) -> None:
        """Add a list as HTML."""
        self.current_node.append(_raw(self._html(token)))

    def _html(self, token: Any) -> str:
        html = RendererHTML().render(token.to_tokens(), self.md_options, self.md_env)
        return html.replace("<code>", '<code class="docutils literal notranslate">')


class GitHubParser(MystParser):
    """A parser of GitHub's Markdown on MyST's renderer."""

    supported = ("markdown",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill `document` with the nodes of a text."""
        env = document.settings.env
        theirs = env.docname in env.events.emit_firstresult(NAVIGATION).site.document_of
        renderer = _Renderer if theirs else _QuickRenderer
        parser = MarkdownIt("commonmark", renderer_cls=renderer).enable(["table", "strikethrough"])
        parser.use(front_matter_plugin).use(gfm_autolink_plugin)
        parser.use(footnote_plugin, inline=False, move_to_end=False)
        parser.options.update(
            tasklists=True,
            alerts=True,
            strikethrough_single_tilde=True,
            myst_config=_CONFIGURATION,
            document=document,
        )
        try:
            parser.render(inputstring)
        except Exception as error:  # others wrote the text: whatever it does to the parser, the site is built
            document += nodes.paragraph("", f"This document cannot be shown: {error!r}")
            document += nodes.literal_block(inputstring, inputstring, language="text")

    def get_transforms(self) -> list[Any]:
        """Return MyST's transforms, and the one that makes a document inert."""
        return [*super().get_transforms(), MakeInert]


class MakeInert(SphinxTransform):
    """The only way of raw HTML, links and pictures into a page.

    What a page shows and lacks is kept in Sphinx's metadata, because a later build does not read it again.
    """

    default_priority = 5  # before docutils sees links and transitions

    def apply(self, **_: Any) -> None:
        """Change the document."""
        self._site: Site = self.env.events.emit_firstresult(NAVIGATION).site
        self._page = self.env.docname
        self._trusted = self._page not in self._site.document_of
        self._kept = self.env.metadata[self._page]
        inert = self._writer()
        self._change(self.document, inert)
        _append(self.document, inert.end())
        if not self._trusted:
            self._anchor(self._site.library.files[self._site.document_of[self._page]].sections)

    def _anchor(self, sections: Sequence[Section]) -> None:
        """Give headings the anchors by which other pages link to them, which may differ from MyST's."""
        headings = {node.line: node for node in self.document.findall(nodes.section)}
        for section in reversed(sections):
            if section.line in headings:
                headings[section.line]["ids"].append(section.anchor)
            else:  # a heading in HTML or in a list
                self.document.insert(0, _raw(f'<span id="{escape(section.anchor)}"></span>'))

    def _writer(self) -> Inert:
        return Inert(lambda target: self._link(target, None), self._picture, self._trusted)

    def _change(self, parent: nodes.Element, inert: Inert) -> None:
        """Change the children of a node. HTML that spans sections is balanced over the whole document."""
        for child in list(parent.children):
            if isinstance(child, nodes.Text):
                continue
            if isinstance(child, nodes.raw):
                self._change_raw(parent, child, inert)
            elif isinstance(child, nodes.image):
                html = self._picture(child["uri"], child.get("alt", ""), isinstance(parent, nodes.reference))
                text = nodes.Text(child.get("alt", "")) if isinstance(parent, nodes.title) else _raw(html)
                parent.replace(child, text)
            elif isinstance(child, nodes.transition):
                parent.replace(child, _raw("<hr>"))  # docutils takes transitions at some places only
            elif isinstance(child, nodes.section):
                self._change(child, inert)
            else:
                own = self._writer()
                self._change(child, own)
                _append(child, own.end())
                self._change_link(parent, child)

    def _change_raw(self, parent: nodes.Element, child: nodes.raw, inert: Inert) -> None:
        html = inert.clean(child.astext()) if child["format"] == "html" else ""
        if isinstance(parent, nodes.title):  # a title is shown as text elsewhere too: keep its anchors only
            found = re.findall(r'<a (?:id|name)="([^"]+)"', html)
            parent.parent["ids"] += [unescape(anchor) for anchor in found]
            html = ""
        parent.replace(child, _raw(html) if html.strip() else [])

    def _change_link(self, parent: nodes.Element, child: nodes.Element) -> None:
        if isinstance(child, nodes.reference) and "refuri" in child:
            address = self._link(child["refuri"], child.line)
            if address is None:
                parent.replace(child, child.children)
            else:
                child["refuri"] = address
                child["internal"] = not scheme(address)

    def _link(self, target: str, line: int | None) -> str | None:
        address = self._site.link(self._page, target)
        if address is None and not scheme(target):
            self._miss(target, line)
        return address

    def _miss(self, target: str, line: int | None = None) -> None:
        document = self._site.document_of.get(self._page, self._page)
        where = f"{document}:{line}" if line else document
        self._kept.setdefault("missing", []).append(f"{where}: {target!r} is not in the repository")

    def _picture(self, target: str, alt: str, linked: bool = False) -> str:
        """Return a picture of the repository, or the description of one elsewhere, which would be loaded."""
        kind, path = scheme(target), self._site.picture(self._page, target)
        if not kind and path is not None:
            self._kept.setdefault("pictures", []).append(path)
            address = relative(self._page, f"{PICTURES}/{path}")
            return f'<img src="{escape(address)}" alt="{escape(alt)}" loading="lazy">'
        if not kind and not target.startswith("//"):
            self._miss(target)
        shown = f'<span class="elsewhere">{escape(alt or posixpath.basename(target) or "picture")}</span>'
        if kind not in ("http", "https") or linked:
            return shown
        return f'<a class="reference external" href="{escape(target)}">{shown}</a>'


def _raw(html: str) -> nodes.raw:
    return nodes.raw("", html, format="html")


def _append(node: nodes.Element, html: str) -> None:
    if html:
        node.append(_raw(html))
