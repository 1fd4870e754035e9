"""Addresses of pages, the same in both outputs: `src/a.py` has the page `src/a.py_docs`.

Addresses have no suffix and begin at the top of the output. A link is relative, so that it works on GitHub,
from a disk and on any server.
"""

import hashlib
import os
import posixpath
import re
from functools import lru_cache
from urllib.parse import quote

KEYWORDS = "keywords"
"""Address of the keyword index of all files. Those of its letters lie in the folder of the same name."""

# A folder of the repository with such a name would lie where a page does: the folder `index.md` of the
# repository and the page `index.md` of its root. Sphinx skips `_sources`. One more "_" keeps names apart,
# also `index.md` and `index.md_`.
_TAKEN = re.compile(r"(.*\.(md|html)|keywords\.json|llms\.txt|\.repopages\.json|_sources)_*", re.IGNORECASE)
_LONGEST = 200  # bytes of a name; most file systems allow 255, with suffixes


@lru_cache(maxsize=1 << 14)
def file_page(path: str) -> str:
    """Return the address of a file's page."""
    return f"{_mirrored(path)}_docs"


def file_keywords(path: str) -> str:
    """Return the address of a file's keywords, if they have a page of their own."""
    return f"{_mirrored(path)}_kw"


def folder_index(path: str) -> str:
    """Return the address of a folder's index. The root is an empty path."""
    return f"{_folder(path)}index"


def folder_page(path: str) -> str:
    """Return the address of a folder's page. The root is an empty path."""
    return f"{_folder(path)}doc"


def document_page(path: str) -> str:
    """Return the address of a readable document in the site. The README of the root is the start page."""
    if path.lower() in ("readme.md", "readme.markdown"):
        return "index"
    document = re.sub(r"\.(md|markdown)$", "", path, flags=re.IGNORECASE)
    return "documents/" + _folder(document.rpartition("/")[0]) + _short(document.rpartition("/")[2])


def relative(here: str, there: str, anchor: str = "") -> str:
    """Return a percent-encoded link from one page to another.

    Args:
        here: Address of the page with the link, without a suffix.
        there: Address of the page that it leads to, with its suffix, or an empty text for the page itself.
        anchor: A place on that page.
    """
    made = _between(here.rpartition("/")[0], there) if there else ""
    return f"{made}#{quote(os.fsencode(anchor))}" if anchor else made


@lru_cache(maxsize=1 << 16)
def _between(folder: str, there: str) -> str:
    base = "/_" * 64  # deep enough for any ".." in `there`, so that the working directory plays no part
    return quote(os.fsencode(posixpath.relpath(f"{base}/{there}", f"{base}/{folder}")))


def _mirrored(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return _folder(folder) + _short(name)


def _folder(path: str) -> str:
    names = path.split("/") if path else []
    return "".join(f"{_short(name + '_' * bool(_TAKEN.fullmatch(name)))}/" for name in names)


def _short(name: str) -> str:
    """Return a name that fits any file system and address. A digest replaces what does not."""
    raw = os.fsencode(name)
    if len(raw) <= _LONGEST and name.isprintable():
        return name
    kept = "".join(letter for letter in raw.decode(errors="ignore") if letter.isprintable())
    digest = hashlib.sha256(raw).hexdigest()[:12]
    return kept.encode()[: _LONGEST - 20].decode(errors="ignore") + f"-{digest}"
