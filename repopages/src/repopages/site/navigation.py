"""The sidebar, the path at the top of a page, and the contents at the end of the start page.

Their cost does not grow with the repository: a page lists its neighbours, and folders lead to all others.
"""

from functools import lru_cache
from html import escape
from typing import TypeVar

from repopages.pages.addresses import KEYWORDS, file_page, folder_index, folder_page, relative
from repopages.site.addresses import DOCUMENTS, START, Site

NAVIGATION = "repopages-navigation"
"""The event of Sphinx by which its extension asks for the `Navigation` of the site."""

_MOST_DOCUMENTS = 40
_MOST_NEIGHBOURS = 30
_PROGRAMS = ("keywords.json", "llms.txt", "objects.inv")

Entry = TypeVar("Entry")


class Navigation:
    """The links around a page.

    Args:
        site: The pages of the site.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._top = site.dialect.top

    def _path(self, page: str) -> str:
        """Return the path in the repository that a page is about."""
        site = self.site
        return site.document_of.get(page) or site.file_of.get(page) or site.folder_of.get(page) or ""

    def _file(self, path: str) -> str:
        return self._top + file_page(path)

    def _folder(self, path: str) -> str:
        return self._top + folder_index(path)

    def breadcrumbs(self, page: str) -> str:
        """Return the path of a page linked to its folders, and a link between a file and its document."""
        path = self._path(page)
        if page == START or (not path and page not in self.site.folder_of):
            return ""
        names = path.split("/") if path else []
        crumbs = [_anchor(_to(page, self._folder("")), self.site.library.name)]
        for depth, name in enumerate(names[:-1], 1):
            crumbs.append(_anchor(_to(page, self._folder("/".join(names[:depth]))), name))
        crumbs += [f"<span>{escape(name)}</span>" for name in names[-1:]]
        other = ""
        if page in self.site.document_of:
            other = _anchor(_to(page, self._file(path)), "About this file")
        elif path in self.site.documents and page in self.site.file_of:
            other = _anchor(_to(page, self.site.documents[path]), "Read this document")
        return f'<nav class="breadcrumbs" aria-label="Path"><div>{" / ".join(crumbs)}</div>{other}</nav>'

    def sidebar(self, page: str) -> str:
        """Return the documents of the repository, and the folders and files around a page."""
        documents = f"<ul>{''.join(self._documents(page))}</ul>"
        parts = [_caption("Documents"), documents] if self.site.documents else []
        files = self._tree(page, "", self._around(page))
        parts += [_caption("Files"), f"<ul>{files}</ul>"]
        others = [(KEYWORDS, "All keywords"), (self._top + folder_page(""), "About the repository")]
        items = "".join(_item(page, target, title, 1) for target, title in others)
        return "".join([*parts, _caption("Index"), f"<ul>{items}</ul>"])

    def _around(self, page: str) -> str:
        path = self._path(page)
        return path if page in self.site.folder_of else path.rpartition("/")[0]

    def _documents(self, page: str) -> list[str]:
        listed = list(self.site.documents.items())
        if len(listed) > _MOST_DOCUMENTS:
            here = self.site.document_of.get(page, "").rpartition("/")[0]
            listed = [(path, target) for path, target in listed if path.rpartition("/")[0] in ("", here)]
        listed = _window(listed, (self.site.document_of.get(page, ""), page))
        shown = [_item(page, target, self.title(path), 1) for path, target in listed]
        return [*shown, _item(page, DOCUMENTS, "All documents", 1)]

    def title(self, path: str) -> str:
        """Return the title of a document."""
        return self.site.library.files[path].title or path.rpartition("/")[2]

    def _tree(self, page: str, folder: str, around: str) -> str:
        """Return the entries of a folder: folders, open on the way to the page, and files near the page."""
        library = self.site.library
        parts, level = [], folder.count("/") + 2 if folder else 1
        for path in library.folders[folder].folders:
            on_the_way = around == path or around.startswith(f"{path}/")
            inside = self._tree(page, path, around) if on_the_way else ""
            parts.append(_item(page, self._folder(path), f"{path.rpartition('/')[2]}/", level, inside))
        files = library.folders[folder].files
        if folder == around:
            shown = _window(list(files), self.site.file_of.get(page, ""))
            parts += [_item(page, self._file(path), path.rpartition("/")[2], level) for path in shown]
            if len(shown) < len(files):
                parts.append(_item(page, self._folder(folder), f"all {len(files):,} files", level))
        return "".join(parts)

    def contents(self) -> str:
        """Return the end of the start page, from which every page can be reached."""
        library = self.site.library
        links = [
            (DOCUMENTS, "All documents", f"{len(self.site.documents):,} Markdown files, to read"),
            (
                self._folder(""),
                "All files",
                f"{len(library.files):,} files in {len(library.folders):,} folders",
            ),
            (self._top + folder_page(""), "About the repository", "structure, languages and imports"),
            (KEYWORDS, "All keywords", "functions, classes, parameters, imports, options and terms"),
        ]
        rows = [
            f"<li>{_anchor(_to(START, target), title)}<span>{text}</span></li>"
            for target, title, text in links
            if target != DOCUMENTS or self.site.documents
        ]
        programs = " · ".join(f'<a href="{name}">{name}</a>' for name in _PROGRAMS)
        return (
            f'<section class="whole-site"><h2>This site</h2><ul>{"".join(rows)}</ul>'
            f"<p>For programs: {programs}</p></section>"
        )


def _window(listed: list[Entry], here: Entry) -> list[Entry]:
    """Return the entries around one of them, if there are too many."""
    if len(listed) <= _MOST_NEIGHBOURS:
        return listed
    place = listed.index(here) if here in listed else 0
    first = max(0, min(place - _MOST_NEIGHBOURS // 2, len(listed) - _MOST_NEIGHBOURS))
    return listed[first : first + _MOST_NEIGHBOURS]


def _caption(text: str) -> str:
    return f'<p class="caption" role="heading"><span class="caption-text">{text}</span></p>'


def _to(page: str, target: str) -> str:
    return _from_folder(page.rpartition("/")[0], target)


@lru_cache(maxsize=100_000)
def _from_folder(folder: str, target: str) -> str:
    """Return the link from any page of a folder. Pages of one folder have most links in common."""
    return relative(f"{folder}/page" if folder else "page", f"{target}.html")


def _anchor(address: str, text: str) -> str:
    return f'<a class="reference internal" href="{escape(address)}">{escape(text)}</a>'


def _item(page: str, target: str, title: str, level: int, inside: str = "") -> str:
    """Return an entry in the markup that furo's style sheet expects of Sphinx's table of contents."""
    is_here = target == page
    classes = [f"toctree-l{level}", *["current"] * bool(is_here or inside), *["current-page"] * is_here]
    if inside:
        classes.append("has-children")
        box = f"folder-{level}"
        inside = (
            f'<input checked class="toctree-checkbox" id="{box}" name="{box}" role="switch" type="checkbox"'
            f' aria-label="Show {escape(title)}"><label for="{box}"><span class="icon"><svg>'
            f'<use href="#svg-arrow-right"></use></svg></span></label><ul>{inside}</ul>'
        )
    link = _anchor("#" if is_here else _to(page, target), title)
    return f'<li class="{" ".join(classes)}">{link}{inside}</li>'
