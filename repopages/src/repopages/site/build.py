"""The build of a site: Markdown is written to the cache folder, and Sphinx runs on it.

Sources and doctrees stay in the cache folder. A second build reads and writes only the pages that changed.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repopages.errors import OptionError, RepopagesError, UnavailableError
from repopages.pages.write import write_pages
from repopages.reading.cache import cache_folder
from repopages.relations.library import Library
from repopages.site.addresses import PICTURES, Site
from repopages.site.documents import write_documents
from repopages.site.links import broken_links
from repopages.site.navigation import NAVIGATION, Navigation

Progress = Callable[[str, int, int], None]

_STATIC = Path(__file__).with_name("static")
_MARK = ".repopages-site.json"  # what the folder of a site holds, and how each page was surrounded
_COPIED = ("keywords.json", "llms.txt")


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished site.

    Attributes:
        folder: Its folder.
        pages: Number of pages, of which `written` were written by this build.
        written: Number of pages that changed.
        keywords: Number of keywords.
        warnings: Warnings of the reader and of Sphinx, then links within the site that lead nowhere.
        missing: Links of the repository's documents to files or headings that it does not have.
    """

    folder: Path
    pages: int
    written: int
    keywords: int
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def build(
    library: Library, out: Path, *, jobs: int | None = None, progress: Progress = lambda *_: None
) -> Built:
    """Build the site of a repository.

    Args:
        library: The repository.
        out: Folder of the site. A site in it is updated, or replaced if it is that of another repository.
        jobs: Number of processes. By default, one for each core.
        progress: Called with a phase, the work done and all work.

    Returns:
        The site, with warnings and broken links.

    Raises:
        OptionError: If `out` holds something else.
        UnavailableError: If Sphinx, MyST-Parser or furo is not installed.
        RepopagesError: If Sphinx fails.
    """
    require_sphinx()
    before = _make_room(out, library.root)
    out.mkdir(parents=True, exist_ok=True)
    _mark(out, library.root, before)  # a build that is stopped leaves a folder that the next one may continue
    cache = cache_folder(library.root) / "site"
    sources = cache / "sources"
    site = Site(library)
    navigation = Navigation(site)
    keywords = write_pages(library, site.dialect, sources, progress).keywords
    write_documents(site, sources)
    pages = [file.relative_to(sources).as_posix().removesuffix(".md") for file in sources.rglob("*.md")]
    around = {page: _digest(navigation, page) for page in pages}
    for page, digest in around.items():
        if before.get(page) != digest:
            # Its listing or its sidebar changed, of which Sphinx does not know: it writes pages that are old.
            with contextlib.suppress(FileNotFoundError):
                os.utime(out / f"{page}.html", (0, 0))
    old = _times(out)
    environment, warnings = _run_sphinx(navigation, cache, out, jobs or os.cpu_count() or 1, progress)
    written = sum(old.get(name) != time for name, time in _times(out).items())
    _copy(site, environment, sources, out)
    _remove_others(out, set(environment.found_docs))
    _mark(out, library.root, around)
    progress("checking links", 0, 1)
    broken = broken_links(out, _keyword_addresses(out))
    theirs = {f"{page}.html" for page in site.document_of}
    missing = [
        line for page in environment.found_docs for line in environment.metadata[page].get("missing", ())
    ]
    missing += [line for line in broken if line.partition(": ")[0] in theirs]
    return Built(
        folder=out,
        pages=len(environment.found_docs),
        written=written,
        keywords=keywords,
        warnings=(*library.warnings, *warnings, *(line for line in broken if line not in missing)),
        missing=tuple(sorted(missing)),
    )


def require_sphinx() -> None:
    """Raise UnavailableError if a package that builds the site is missing."""
    for name in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(name) is None:
            raise UnavailableError(
                f"building a site needs {name}, on Python 3.11 or newer: pip install sphinx myst-parser furo,"
                " or pass --format markdown"
            )


def _make_room(out: Path, root: Path) -> dict[str, str]:
    """Return the digests of the pages of an earlier site of the same repository.

    The site of another repository is removed. Anything else is kept, and OptionError raised.
    """
    if out.exists() and not out.is_dir():
        raise OptionError(f"out={str(out)!r} is a file: pass a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return {}
    if not (out / _MARK).exists():
        raise OptionError(f"out={str(out)!r} is a folder with other files: choose an empty or a new one")
    try:
        mark = json.loads((out / _MARK).read_text())
        if mark["root"] == str(root):
            return dict(mark["pages"])
    except (ValueError, KeyError, TypeError):
        pass  # cut off by a build that was killed
    shutil.rmtree(out)
    return {}


def _mark(out: Path, root: Path, pages: dict[str, str]) -> None:
    (out / _MARK).write_text(json.dumps({"root": str(root), "pages": pages}))


def _digest(navigation: Navigation, page: str) -> str:
    """Return a digest of all that is put into a page after Sphinx rendered it."""
    site = navigation.site
    path = site.file_of.get(page)
    source = site.library.files[path].digest if path is not None else ""
    parts = [source, navigation.breadcrumbs(page), navigation.sidebar(page)]
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]


class _Status(io.StringIO):
    """The stream of Sphinx's messages, which reports its percentages as numbers of pages."""

    def __init__(self, progress: Progress, pages: int) -> None:
        super().__init__()
        self._progress, self._pages = progress, pages

    def write(self, text: str) -> int:
        """Report the percentage in a message."""
        found = re.search(r"(reading|writing)[\w ]*\.\.\. .*\[\s*(\d+)%\]", text)
        if found:
            self._progress(f"{found[1]} pages", int(found[2]) * self._pages // 100, self._pages)
        return len(text)


def _run_sphinx(
    navigation: Navigation, cache: Path, out: Path, jobs: int, progress: Progress
) -> tuple[Any, tuple[str, ...]]:
    """Run Sphinx without a conf.py. Return its environment and its warnings."""
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError
    from sphinx.util.console import strip_escape_sequences

    sources, doctrees, warned = cache / "sources", cache / "doctrees", io.StringIO()
    warned_before = cache / "warned"
    try:
        app = Sphinx(
            srcdir=sources,
            confdir=None,
            outdir=out,
            doctreedir=doctrees,
            buildername="html",
            confoverrides=_configuration(navigation.site),
            status=_Status(progress, sum(1 for _ in sources.rglob("*.md"))),
            warning=warned,
            # Sphinx does not repeat the warnings of pages that it does not read again.
            freshenv=warned_before.exists(),
            parallel=jobs,
        )
        app.connect(NAVIGATION, lambda _: navigation)
        app.build()
    except SphinxError as error:
        raise RepopagesError(f"Sphinx failed: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RepopagesError(f"Sphinx failed: {type(error).__name__}: {error}") from error
    lines = strip_escape_sequences(warned.getvalue()).replace(f"{sources}/", "").splitlines()
    warnings = tuple(line for line in lines if line.strip())
    warned_before.touch() if warnings else warned_before.unlink(missing_ok=True)
    return app.env, warnings


def _configuration(site: Site) -> dict[str, object]:
    # furo puts the name into its pages as it is.
    name = re.sub(r"[<>&\"']", "", site.library.name)
    return {
        "project": name,
        "extensions": ["repopages.site.extension"],
        "html_theme": "furo",
        "html_title": name,
        "html_static_path": [str(_STATIC)],
        "html_css_files": ["repopages.css"],
        "html_js_files": [("repopages.js", {"defer": "defer"})],
        "html_copy_source": False,
        "html_show_copyright": False,
        "html_show_search_summary": False,  # it fetches pages, which browsers forbid on file://
        "html_last_updated_fmt": None,
        "html_use_index": False,
        "html_domain_indices": False,
        "templates_path": [],
        # "app": a second build in one process registers nodes again. The others: how others write Markdown.
        "suppress_warnings": ["app", "docutils", "misc.highlighting_failure", "myst", "toc.not_included"],
        "smartquotes": False,
        "language": "en",
        "pygments_style": "default",
    }


def _copy(site: Site, environment: Any, sources: Path, out: Path) -> None:
    """Copy the pictures that pages show, and the indexes for programs."""
    for name in _COPIED:
        shutil.copy(sources / name, out / name)
    shown = {
        path for page in environment.found_docs for path in environment.metadata[page].get("pictures", ())
    }
    for path in sorted(shown):
        target = out / PICTURES / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it disappeared since it was read
            shutil.copyfile(site.library.root / path, target, follow_symlinks=False)


def _remove_others(out: Path, pages: set[str]) -> None:
    """Remove pages of files that are gone, which Sphinx leaves."""
    kept = {f"{page}.html" for page in pages} | {"search.html"}
    for file in out.rglob("*.html"):
        name = file.relative_to(out).as_posix()
        if name not in kept and not name.startswith(("_static/", f"{PICTURES}/")):
            file.unlink()


def _keyword_addresses(out: Path) -> set[str]:
    found = json.loads((out / "keywords.json").read_text(encoding="utf-8"))["keywords"]
    return {keyword["url"] for keyword in found}


def _times(out: Path) -> dict[str, int]:
    """Return when each page was written. Sphinx writes the page of the search every time."""
    return {str(file): file.stat().st_mtime_ns for file in out.rglob("*.html") if file.name != "search.html"}
