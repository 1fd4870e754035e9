"""Keywords as pages, as JSON, and the list of pages for assistants."""

import json
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from repopages.pages.addresses import KEYWORDS, file_page, folder_page, relative
from repopages.pages.book import Book, Keyword, Page
from repopages.pages.keywords import by_word, keywords_of
from repopages.pages.markup import code, counted, escape, link, listed, shown, table

_MOST_PLACES = 12
_MOST_WORDS = 1500  # of a page: GitHub does not render files of more than about 500 KB


def keyword_list(page: Page, found: Sequence[Keyword], here: str = "") -> str:
    """Return the keywords of one file as a list.

    Args:
        page: The file's page.
        found: Its keywords, sorted.
        here: Address of the page with the list, if it is another one.
    """
    dialect = page.book.dialect
    there = page.here + dialect.suffix if here else ""
    lines = []
    for word, places in by_word(found).items():
        links = [
            f"{_place(keyword, relative(here, there, keyword.anchor))} ({keyword.kind})" for keyword in places
        ]
        lines.append(f"- {code(word)}: {listed(links, _MOST_PLACES)}")
    return "\n".join(lines)


def _place(keyword: Keyword, target: str) -> str:
    is_definition = keyword.section not in (
        "Purpose",
        "Dependencies",
        "Security and safety",
        "Testing and usage",
    )
    text = (
        code(keyword.section)
        if is_definition and keyword.kind not in ("heading", "term", "definition")
        else ""
    )
    return link(text or escape(keyword.section) or "top", target)


def keyword_page(page: Page) -> str:
    """Return the page with the keywords of a file."""
    found = keywords_of(page.book, page.path)
    here = page.book.dialect.top + file_page(page.path).removesuffix("_docs") + "_kw"
    back = link(code(page.path), relative(here, page.here + page.book.dialect.suffix))
    head = f"# Keywords of {code(page.path)}\n\n{counted(len(by_word(found)), 'keyword')} of {back}"
    return (
        f"{head}, each with the sections of its page that explain it.\n\n{keyword_list(page, found, here)}\n"
    )


def letter_pages(
    book: Book, found: Sequence[Keyword]
) -> Iterator[tuple[str, str, list[tuple[str, list[Keyword]]]]]:
    """Yield address, title and words of each page of the index of all keywords.

    Args:
        book: All pages.
        found: All keywords, sorted.
    """
    letters: dict[str, list[tuple[str, list[Keyword]]]] = {}
    for word, places in by_word(found).items():
        letters.setdefault(initial(word), []).append((word, places))
    for letter, words in sorted(letters.items()):
        for number, start in enumerate(range(0, len(words), _MOST_WORDS), 1):
            held = words[start : start + _MOST_WORDS]
            more = len(words) > _MOST_WORDS
            title = f"{letter}: {held[0][0]} to {held[-1][0]}" if more else letter
            yield f"{KEYWORDS}/{letter}{f'-{number}' if number > 1 else ''}", title, held


def initial(word: str) -> str:
    """Return the letter under which a word is listed. Signs before it do not count."""
    first = next((letter for letter in word if letter.isalnum()), "")
    return first.upper() if first.isascii() and first.isalpha() else "0-9" if first.isdigit() else "Other"


def letter_page(book: Book, address: str, title: str, words: Sequence[tuple[str, Sequence[Keyword]]]) -> str:
    """Return one page of the index of all keywords."""
    dialect = book.dialect
    back = relative(address, KEYWORDS + dialect.suffix)
    lines = [
        f"# Keywords: {escape(title)}",
        "",
        f"{counted(len(words), 'keyword')}. [All letters]({back})",
        "",
    ]
    for word, places in words:
        files: dict[str, list[Keyword]] = {}
        for keyword in places:
            files.setdefault(keyword.path, []).append(keyword)
        links = []
        for path, held in files.items():
            target = relative(address, dialect.top + file_page(path) + dialect.suffix, held[0].anchor)
            kinds = ", ".join(dict.fromkeys(keyword.kind for keyword in held))
            links.append(f"{link(code(path), target)} ({kinds})")
        lines.append(f"- {code(word)}: {listed(links, _MOST_PLACES)}")
    return "\n".join([*lines, ""])


def letters_page(book: Book, pages: Sequence[tuple[str, str, int]]) -> str:
    """Return the first page of the index of all keywords.

    Args:
        book: All pages.
        pages: Address, title and number of words of each page.
    """
    total = sum(words for _, _, words in pages)
    rows = [
        [link(escape(title), relative(KEYWORDS, address + book.dialect.suffix)), f"{words:,}"]
        for address, title, words in pages
    ]
    intro = (
        f"{counted(total, 'keyword')} of {counted(len(book.library.files), 'file')}: functions, classes, "
        "parameters, imports, errors, constants, environment variables, options, and headings and terms of"
        " documents."
    )
    held = table(["letter", "keywords"], rows, most=len(rows))
    return f"# Keyword index of {escape(book.library.name)}\n\n{intro}\n\n{held}\n"


def keywords_json(book: Book, found: Sequence[Keyword]) -> str:
    """Return all keywords as JSON, one on each line."""
    dialect, entries = book.dialect, []
    for keyword in found:
        url = relative("", dialect.top + file_page(keyword.path) + dialect.suffix, keyword.anchor)
        held = {"word": keyword.word, "kind": keyword.kind, "file": keyword.path, "section": keyword.section}
        entries.append(
            {**held, "url": url, "summary": keyword.summary} if keyword.summary else {**held, "url": url}
        )
    text = json.dumps({"repository": book.library.name, "keywords": entries}, ensure_ascii=False)
    # One encoding of all is much faster than one for each. A quote within a text has a backslash before it.
    return shown(text.replace('"}, {"', '"},\n{"')) + "\n"


def keywords_from(text: str) -> dict[str, list[Keyword]]:
    """Return the keywords of each file from the JSON that was written of them."""
    found: dict[str, list[Keyword]] = {}
    for entry in json.loads(text)["keywords"]:
        anchor, path = unquote(entry["url"].partition("#")[2]), entry["file"]
        keyword = Keyword(
            entry["word"], entry["kind"], path, anchor, entry["section"], entry.get("summary", "")
        )
        found.setdefault(path, []).append(keyword)
    return found


def llms_text(book: Book) -> str:
    """Return `llms.txt`: every page with one line, for assistants."""
    library, dialect = book.library, book.dialect

    def entry(text: str, address: str, summary: str) -> str:
        target = relative("", dialect.top + address + dialect.suffix)
        return f"- [{escape(text)}]({target})" + (f": {summary}" if summary else "")

    readme = next((path for path in library.folders[""].files if path.lower().startswith("readme")), "")
    lines = [f"# {escape(library.name)}", ""]
    lines += [f"> {book.summary(readme)}", ""] if readme and book.summary(readme) else []
    lines += ["Machine-readable keyword index: [keywords.json](keywords.json)", ""]
    for role, title in (
        ("document", "Documents"),
        ("source", "Sources"),
        ("test", "Tests"),
        ("data", "Data"),
        ("other", "Other files"),
    ):
        paths = [path for path, facts in library.files.items() if facts.role == role]
        if paths:
            lines += [
                f"## {title}",
                "",
                *(entry(path, file_page(path), book.summary(path)) for path in paths),
                "",
            ]
    lines += ["## Folders", ""]
    lines += [entry(path or library.name, folder_page(path), "") for path in library.folders]
    return "\n".join([*lines, ""])
