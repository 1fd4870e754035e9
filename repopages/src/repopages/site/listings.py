"""Pages of highlighted source, one for each module, with an anchor for every line.

They are written without Sphinx, which would render the whole sidebar on each of hundreds of pages.
"""

from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from repopages.reading.project import Project

_FOLDER = "source"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - source</title>
<link rel="stylesheet" href="listing.css">
<script>document.documentElement.dataset.theme = localStorage.getItem("theme") || "auto"</script>
</head>
<body>
<h1>{name}</h1>
<p><a href="../{page}.html">Documentation</a> · <a href="../index.html">{package}</a> · {path}</p>
{code}
</body>
</html>
"""
_LAYOUT = """
body { margin: 0 auto; max-width: 75rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
a { color: #2962ff; }
.highlight { overflow-x: auto; font-size: 0.85rem; line-height: 1.4; padding: 0.5rem; border-radius: 4px; }
.highlight pre { margin: 0; }
.highlight .linenos { opacity: 0.5; padding-right: 1em; user-select: none; text-decoration: none; }
.highlight a { color: inherit; text-decoration: none; }
.highlight span:target { outline: 2px solid #2962ff; }
"""
_DARK = "body { background: #131416; color: #d0d0d0; }\na { color: #6ea8ff; }"


def write_listings(project: Project, out: Path) -> None:
    """Write the source of every module of a package below `out`.

    Args:
        project: The package.
        out: Folder of the site.
    """
    folder = out / _FOLDER
    folder.mkdir()
    formatter, lexer = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True), PythonLexer()
    for module in project.modules.values():
        page = _PAGE.format(
            name=escape(module.name),
            page=project.page_of[module.name].document,
            package=escape(project.name),
            path=escape(project.shown_path(module)),
            code=highlight(module.text, lexer, formatter),
        )
        (folder / f"{module.name}.html").write_text(page, encoding="utf-8")
    (folder / "listing.css").write_text(_styles(), encoding="utf-8")


def _styles() -> str:
    """Return the colours of both themes. The reader's choice on the site overrides the system's."""
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight") + _DARK
    system = f"@media (prefers-color-scheme: dark) {{ html:not([data-theme=light]) {{ {dark} }} }}"
    return f"{_LAYOUT}\n{light}\n{system}\nhtml[data-theme=dark] {{ {dark} }}\n"
