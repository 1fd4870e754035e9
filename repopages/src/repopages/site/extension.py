"""The Sphinx extension, which links the types in signatures."""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from repopages import __version__
from repopages.pages.names import Names


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension to Sphinx. `documented_names` is set by the build."""
    app.add_config_value("documented_names", None, "", types=[Names])
    app.connect("missing-reference", resolve)
    return {"version": __version__, "parallel_read_safe": True}


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Link a type in a signature to the one public object of that name, or leave it as text.

    Broken links that a page spells out are still reported.
    """
    names: Names | None = app.config.documented_names
    if names is None or node.get("refdomain") != "py" or node.get("refexplicit"):
        return None
    found = names.unique(node["reftarget"]) if node.get("reftype") in ("class", "exc") else None
    if found is None:
        return content
    pending = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=found)
    python = env.get_domain("py")
    made = python.resolve_xref(env, node.get("refdoc"), app.builder, "obj", found, pending, content)
    return made or content
