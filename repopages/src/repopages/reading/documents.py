"""Markdown and plain text: headings, terms, links and the words in each section. Nothing is executed."""

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from repopages.reading.model import Facts, Import
from repopages.reading.outline import PARAGRAPH, Outline, Part, code_term, identifiers, term

_FRONT = re.compile(r"\A---[ \t]*\n(.*?\n)?(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_HTML_LINK = re.compile(
    r"<(?:a|img|source|video)\b[^<>]{0,300}?\b(?:href|src)\s*=\s*[\"']([^\"'>]{1,500})", re.IGNORECASE
)
_HTML_TITLE = re.compile(r"<h1\b[^>]*>(.{1,300}?)</h1>", re.IGNORECASE | re.DOTALL)
_TEXTS = ("text", "text_special", "code_inline")
_SIGNS = 1000
_TAG = re.compile(r"<[^<>]{0,300}>")


def read_markdown(facts: Facts) -> Facts:
    """Return the facts of a Markdown document.

    Args:
        facts: Its path and text.

    Returns:
        The same with title, first paragraph, sections with their terms, and links.
    """
    document = Outline()
    outline_markdown(facts.text, document, 0)
    return document.facts(facts)


def outline_markdown(text: str, document: Outline, above: int) -> None:
    """Read Markdown into a document, with so many lines above it."""
    front = _FRONT.match(text)
    if front:
        title = re.search(r"^title:\s*[\"']?(.*?)[\"']?\s*$", front.group(1) or "", re.MULTILINE)
        document.title = document.title or (title.group(1) if title else "")
        # Blank lines instead, so that the lines below keep their numbers.
        text = "\n" * front.group().count("\n") + text[front.end() :]
    tokens = _tokens(text)
    cells: list[tuple[Token, int]] = []
    for number, token in enumerate(tokens):
        line = above + (token.map[0] if token.map else 0) + 1
        before = tokens[number - 1].type if number else ""
        if token.type == "inline" and before == "heading_open":
            document.head(_plain(token), int(tokens[number - 1].tag[1]), line)
            _inline(token, document, line)
        elif token.type == "inline":
            _inline(token, document, line)
            if before in ("td_open", "th_open"):
                cells += [(token, line)] if before == "td_open" else []
                document.part.words |= identifiers(_plain(token))
            elif _plain(token).strip():
                document.say(_plain(token))
        elif token.type == "tr_close":
            _row(cells, document)
            cells = []
        elif token.type in ("fence", "code_block"):
            _code(token.info.strip().partition(" ")[0], token.content, document, line)
        elif token.type == "html_block":
            _raw(token.content, document, line)


def _tokens(text: str) -> list[Token]:
    """Return the tokens of a text; a paragraph with thousands of brackets or stars stays plain.

    The parser looks for the end of each bracket in the rest of its paragraph: 60 kB of "![" took 3 s.
    """
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    parser.core.ruler.disable("inline")
    env: dict[str, Any] = {}
    tokens = parser.parse(text, env)
    for token in tokens:
        if token.type == "inline":
            token.children = []
            if max(token.content.count(sign) for sign in "[*_<`~") <= _SIGNS:
                parser.inline.parse(token.content, parser, env, token.children)
            else:
                token.children = [Token("text", "", 0, content=token.content)]
    return tokens


def _plain(token: Token) -> str:
    """Return the text of an inline token without markup."""
    children = token.children or []
    return "".join(
        child.content if child.type in _TEXTS else " " * ("break" in child.type) for child in children
    )


def _inline(token: Token, document: Outline, line: int) -> None:
    """Take emphasised words, code spans, links and raw HTML."""
    children = token.children or []
    for number, child in enumerate(children):
        if "break" in child.type:
            line += 1
        elif child.type == "code_inline":
            document.part.add(code_term(child.content), "code", line)
        elif child.type in ("strong_open", "em_open"):
            inside, rest = _until_close(children, number)
            # **term**: meaning, at the start of a paragraph or an element of a list.
            meaning = re.match(r"\s*[:\u2013\u2014-]\s+(\S.*)|\s*:?\s*(\S.*)", rest, re.DOTALL)
            leads = not any(before.content.strip() for before in children[:number])
            defined = leads and (
                inside.rstrip().endswith(":") or re.match(r"\s*[:\u2013\u2014]|\s+-\s", rest)
            )
            text = next(filter(None, meaning.groups()), "") if defined and meaning else ""
            document.part.add(term(inside), "defined" if text else "emphasised", line, text)
        elif child.type in ("link_open", "image"):
            target = child.attrs.get("href") or child.attrs.get("src") or ""
            document.links.append((str(target), line))
        elif child.type == "html_inline":
            _raw(child.content, document, line)


def _until_close(children: list[Token], number: int) -> tuple[str, str]:
    """Return the text inside an emphasis and the text behind it on the line."""
    close = children[number].type.replace("open", "close")
    end = next((at for at in range(number, len(children)) if children[at].type == close), number)
    texts = [child.content if child.type in _TEXTS else " " for child in children]
    return "".join(texts[number:end]).strip(), "".join(texts[end : end + 40])[1:]


def _row(cells: list[tuple[Token, int]], document: Outline) -> None:
    """Take a row of a table that defines a term: its first cell is emphasised or code, and nothing else."""
    if len(cells) < 2:
        return
    first = [child for child in cells[0][0].children or [] if child.content.strip() or child.type != "text"]
    if first and first[0].type in ("strong_open", "em_open", "code_inline"):
        text = _plain(cells[0][0])
        word = code_term(text) if first[0].type == "code_inline" else term(text)
        document.part.add(word, "defined", cells[0][1], " ".join(_plain(cells[1][0]).split()))


def _code(language: str, text: str, document: Outline, line: int) -> None:
    """Take the words of a block of code, which is an example of its language."""
    document.part.words |= identifiers(text)
    first = next((row for row in text.splitlines() if row.strip()), "")
    if language and first:
        document.find(
            "pattern", f"example in {re.sub(r'[^A-Za-z0-9+#-]', '', language) or 'code'}", first, line
        )
    for number, row in enumerate(text.splitlines()):
        if re.search(r"\b(?:curl|wget)\b.*\|\s*(?:sudo\s+)?(?:ba|z)?sh\b", row[:400]):
            document.find("security", "tells the reader to run a download at once", row, line + 1 + number)


def _raw(text: str, document: Outline, line: int) -> None:
    """Take links, the title and the words of raw HTML."""
    for target in _HTML_LINK.findall(text):
        document.links.append((html.unescape(target), line))
    title = _HTML_TITLE.search(text)
    if title and not document.title:
        document.title = " ".join(html.unescape(_TAG.sub(" ", title.group(1))).split())
    document.part.words |= identifiers(_TAG.sub(" ", text))
    if re.search(r"<\s*(?:script|iframe|object|embed)\b|\bon\w+\s*=|javascript:", text, re.IGNORECASE):
        document.find("security", "raw HTML that can run code", text, line)


_RULE = re.compile(r"\W*")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*(?:[=<>!~;@#].*)?$")


def read_text(facts: Facts) -> Facts:
    """Return the facts of a plain text: its first line as the title, its paragraphs and links.

    Args:
        facts: Its path, role and text.

    Returns:
        The same; for a list of requirements, which has the role "data", with the imports that it states.
    """
    if facts.role == "data":
        return _requirements(facts)
    document = Outline()
    for line, paragraph in _paragraphs(facts.text):
        if not document.parts:
            first, _, paragraph = paragraph.partition("\n")
            document.title = first if len(first) <= 100 else ""
            document.parts.append(Part(document.title, 1, line, ""))
            paragraph = paragraph or ("" if document.title else first)
        if paragraph:
            document.say(paragraph)
        urls = re.findall(r"https?://[^\s<>\"']+", paragraph)
        document.links += [(url.rstrip(".,);"), line) for url in urls]
    return document.facts(facts)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text, each with its first line; rules are left out."""
    start = 0
    rows: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not _RULE.fullmatch(line):
            start = start if rows else number
            rows.append(line.strip())
        elif rows:
            yield start, "\n".join(rows)
            rows = []


def _requirements(facts: Facts) -> Facts:
    imports, links, notes = [], [], []
    for number, line in enumerate(facts.text.splitlines(), 1):
        other = re.match(r"\s*(?:-r|-c|--requirement|--constraint)[ =]\s*(\S+)", line)
        found = _REQUIREMENT.match(line)
        if other:
            links.append((other.group(1), number))
        elif found:
            imports.append(Import(module=found.group(1), line=number))
        elif not imports and line.startswith("#"):
            notes.append(line.strip("# "))
    return replace(facts, imports=tuple(imports), links=tuple(links), doc=" ".join(notes).strip()[:PARAGRAPH])
