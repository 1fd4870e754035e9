"""The build of a site, which writes Markdown to a separate folder and runs Sphinx on it."""

import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from repopages.errors import OptionError, RepopagesError, UnavailableError
from repopages.pages.book import Book
from repopages.pages.keywords import all_keywords
from repopages.pages.layout import index_page, keyword_page, llms_text, module_page
from repopages.reading.project import Project
from repopages.reading.relations import document_of
from repopages.site.links import broken_links

_STATIC = Path(__file__).with_name("static")
_MARK = "keywords.json"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished site.

    Attributes:
        folder: Its folder.
        pages: Number of pages about modules and internal packages.
        keywords: Number of keywords.
        warnings: Sphinx's warnings, then the links that lead nowhere.
    """

    folder: Path
    pages: int
    keywords: int
    warnings: tuple[str, ...]


def build(path: str, out: Path) -> Built:
    """Build the documentation of a package.

    Args:
        path: A checkout, the folder of a package, or the name of an installed one. It is not imported.
        out: Folder of the site. An earlier site in it is replaced.

    Returns:
        The site, with Sphinx's warnings and the broken links.

    Raises:
        OptionError: If there is no such package, or `out` holds something else.
        UnavailableError: If Sphinx, MyST-Parser or furo is not installed.

    Example::

        built = build("json", Path("site"))
    """
    book = Book(Project.find(path))
    require_sphinx()
    _make_room(out)
    # Sphinx reads a folder outside the checkout, so that a build writes nothing beside the sources.
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "sources"
        write_sources(book, sources)
        warnings = _run_sphinx(book, sources, out)
        from repopages.site.listings import write_listings

        write_listings(book.project, out)
        for name in (_MARK, "llms.txt"):
            shutil.copy(sources / name, out / name)
    keywords = json.loads((out / _MARK).read_text())["keywords"]
    broken = broken_links(out, [keyword["url"] for keyword in keywords])
    return Built(
        folder=out, pages=len(book.project.pages), keywords=len(keywords), warnings=(*warnings, *broken)
    )


def require_sphinx() -> None:
    """Raise UnavailableError if a package that builds the site is missing."""
    for name in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(name) is None:
            raise UnavailableError(
                f"building documentation needs {name}, on Python 3.11 or newer: pip install sphinx"
                " myst-parser furo"
            )


def _make_room(out: Path) -> None:
    """Remove an earlier site. Raise OptionError if the folder holds anything else."""
    if out.is_dir() and any(out.iterdir()) and not (out / _MARK).exists():
        raise OptionError(f"out={str(out)!r} is a folder with other files: choose an empty or a new one")
    if out.exists() and not out.is_dir():
        raise OptionError(f"out={str(out)!r} is a file: pass a folder")
    shutil.rmtree(out, ignore_errors=True)


def write_sources(book: Book, folder: Path) -> None:
    """Write all pages as Markdown, the keywords as JSON, and the pages of the checkout."""
    (folder / "modules").mkdir(parents=True)
    for page in book.project.pages:
        (folder / f"{page.document}.md").write_text(module_page(book, page), encoding="utf-8")
    keywords = all_keywords(book)
    (folder / "keywords.md").write_text(keyword_page(keywords), encoding="utf-8")
    (folder / "llms.txt").write_text(llms_text(book), encoding="utf-8")
    found = [{**asdict(keyword), "url": keyword.url} for keyword in keywords]
    (folder / _MARK).write_text(json.dumps({"package": book.project.name, "keywords": found}, indent=1))
    root, readme = book.project.root, ""
    for path in book.relations.pages if root is not None else ():
        assert root is not None
        document, text = document_of(path.relative_to(root).as_posix()), _page_text(book, path, root, folder)
        if document == "index":
            readme = text
            continue
        target = folder / f"{document}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / "index.md").write_text(index_page(book, readme), encoding="utf-8")


def _page_text(book: Book, path: Path, root: Path, folder: Path) -> str:
    """Return a Markdown page for the site, and copy its pictures.

    Links to other files of the checkout become code. Public names that begin the row of a table become links.
    """

    def changed(link: re.Match[str]) -> str:
        there, _, _ = link["target"].partition("#")
        file = (path.parent / there).resolve()
        if file == root / "README.md":
            return link[0].replace(there, os.path.relpath(root / "index.md", path.parent))
        if "://" in link["target"] or not there or not file.exists() or file in book.relations.pages:
            return link[0]
        if file.suffix in (".png", ".svg", ".jpg"):
            copy = folder / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
            return link[0]
        return f"`{file.relative_to(root).as_posix()}`"

    def named(row: re.Match[str]) -> str:
        found = book.names.public(row["name"])
        return f"| {{py:obj}}`{row['name']}{row['call']} <{found}>`" if found else row[0]

    text = re.sub(r"!?\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", changed, path.read_text(encoding="utf-8"))
    return re.sub(r"^\| `(?P<name>[\w.]+)(?P<call>(?:\(\))?)`", named, text, flags=re.M)


def _run_sphinx(book: Book, sources: Path, out: Path) -> tuple[str, ...]:
    """Run Sphinx without a conf.py. Return its warnings. Raise RepopagesError if it fails."""
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError
    from sphinx.util.console import strip_escape_sequences

    warned = io.StringIO()
    try:
        application = Sphinx(
            srcdir=sources,
            confdir=None,
            outdir=out,
            doctreedir=sources.parent / "doctrees",
            buildername="html",
            confoverrides=_configuration(book),
            status=None,
            warning=warned,
            freshenv=True,
        )
        application.build()
    except SphinxError as error:
        raise RepopagesError(f"Sphinx failed: {error}") from error
    lines = strip_escape_sequences(warned.getvalue()).splitlines()
    return tuple(line.replace(f"{sources}/", "") for line in lines if line.strip())


def _configuration(book: Book) -> dict[str, object]:
    return {
        "project": book.project.name,
        "extensions": ["myst_parser", "repopages.site.extension"],
        "html_theme": "furo",
        "html_title": book.project.name,
        "html_static_path": [str(_STATIC)],
        "html_css_files": ["repopages.css"],
        "html_copy_source": False,
        "html_show_copyright": False,
        "html_show_search_summary": False,  # it fetches pages, which browsers forbid on file://
        "html_last_updated_fmt": None,
        "templates_path": [],
        "suppress_warnings": ["app"],  # of a second build in one process, which registers nodes again
        "myst_enable_extensions": ["colon_fence", "fieldlist"],
        "myst_heading_anchors": 4,
        "python_maximum_signature_line_length": 88,
        "python_use_unqualified_type_names": True,
        "toc_object_entries": False,
        "nitpicky": True,  # a name that a page links to and the site lacks is a warning
        "documented_names": book.names,
        "language": "en",
        "pygments_style": "default",
    }
