"""Markdown, reStructuredText, notebooks and plain text: headings, terms, links and the words in each section.

Nothing is executed, no directive is run and no other file is included.
"""

import ast
import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from repopages.reading.model import Facts, Finding, Import, Mention, Section
from repopages.reading.words import code_term, identifiers, slug, term

_FRONT = re.compile(r"\A---[ \t]*\n(.*?\n)?(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_HTML_LINK = re.compile(
    r"<(?:a|img|source|video)\b[^>]*?\b(?:href|src)\s*=\s*[\"']([^\"'>]{1,500})", re.IGNORECASE
)
_HTML_TITLE = re.compile(r"<h1\b[^>]*>(.{1,300}?)</h1>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<[^<>]{0,300}>")
_PARAGRAPH = 600
"""Characters of a first paragraph that are kept."""


@dataclass
class _Part:
    """A section while its document is read."""

    title: str
    level: int
    line: int
    anchor: str
    text: str = ""
    words: set[str] = field(default_factory=set)
    terms: dict[str, Mention] = field(default_factory=dict)

    def add(self, word: str, kind: str, line: int, text: str = "") -> None:
        """Add a term; a definition replaces a mere emphasis."""
        known = self.terms.get(word.lower())
        if word and (known is None or (kind == "defined" and known.kind != "defined")):
            self.terms[word.lower()] = Mention(word=word, line=line, kind=kind, text=text[:_PARAGRAPH])

    def section(self) -> Section:
        """Return the finished section."""
        return Section(
            title=self.title,
            level=self.level,
            line=self.line,
            anchor=self.anchor,
            text=self.text,
            words=frozenset(self.words),
            terms=tuple(self.terms.values()),
        )


@dataclass
class _Document:
    """What is known of a document while it is read."""

    title: str = ""
    doc: str = ""
    parts: list[_Part] = field(default_factory=list)
    links: list[tuple[str, int]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    anchors: dict[str, int] = field(default_factory=dict)

    @property
    def part(self) -> _Part:
        """The section that is read now; text above the first heading is a section without one."""
        if not self.parts:
            self.parts.append(_Part("", 1, 1, ""))
        return self.parts[-1]

    def head(self, title: str, level: int, line: int) -> None:
        """Start a section."""
        title = " ".join(title.split())
        self.parts.append(_Part(title, level, line, slug(title, self.anchors)))
        self.title = self.title or title
        self.part.words |= identifiers(title)

    def say(self, text: str) -> None:
        """Add a paragraph, which introduces its section and the document if it is the first."""
        text = " ".join(text.split())
        self.part.text = self.part.text or text[:_PARAGRAPH]
        self.doc = self.doc or text[:_PARAGRAPH]
        self.part.words |= identifiers(text)

    def find(self, topic: str, label: str, code: str, line: int) -> None:
        """Add a finding."""
        self.findings.append(Finding(topic=topic, label=label, code=" ".join(code.split())[:160], line=line))

    def facts(self, facts: Facts) -> Facts:
        """Return the facts of the document; a section without a heading is named by the file."""
        for part in self.parts:
            part.title = part.title or self.title or facts.name
        return replace(
            facts,
            title=self.title,
            doc=self.doc,
            sections=tuple(part.section() for part in self.parts),
            links=tuple(dict.fromkeys(self.links)),
            findings=tuple(sorted(self.findings, key=lambda finding: finding.line)),
        )


def read_markdown(facts: Facts) -> Facts:
    """Return the facts of a Markdown document.

    Args:
        facts: Its path and text.

    Returns:
        The same with title, first paragraph, sections with their terms, and links.
    """
    document = _Document()
    _read_markdown(facts.text, document, 0)
    return document.facts(facts)


def _read_markdown(text: str, document: _Document, above: int) -> None:
    """Read Markdown into a document, with so many lines above it."""
    front = _FRONT.match(text)
    if front:
        title = re.search(r"^title:\s*[\"']?(.*?)[\"']?\s*$", front.group(1) or "", re.MULTILINE)
        document.title = document.title or (title.group(1) if title else "")
        # Blank lines instead, so that the lines below keep their numbers.
        text = "\n" * front.group().count("\n") + text[front.end() :]
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    tokens = parser.parse(text)
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
                cells.append((token, line))
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


def _plain(token: Token) -> str:
    """Return the text of an inline token without markup."""
    kinds = ("text", "code_inline")
    parts = [
        child.content if child.type in kinds else " " * ("break" in child.type)
        for child in token.children or []
    ]
    return "".join(parts)


def _inline(token: Token, document: _Document, line: int) -> None:
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
            meaning = re.match(r"\s*[:–—-]\s+(\S.*)|\s*:?\s*(\S.*)", rest, re.DOTALL)
            defined = number == 0 and (inside.rstrip().endswith(":") or re.match(r"\s*[:–—]|\s+-\s", rest))
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
    texts = [child.content if child.type in ("text", "code_inline") else " " for child in children]
    return "".join(texts[number:end]).strip(), "".join(texts[end : end + 40])[1:]


def _row(cells: list[tuple[Token, int]], document: _Document) -> None:
    """Take a row of a table that defines a term: its first cell is emphasised or code, and nothing else."""
    if len(cells) < 2:
        return
    first = [child for child in cells[0][0].children or [] if child.content.strip() or child.type != "text"]
    if first and first[0].type in ("strong_open", "em_open", "code_inline"):
        text = _plain(cells[0][0])
        word = code_term(text) if first[0].type == "code_inline" else term(text)
        document.part.add(word, "defined", cells[0][1], " ".join(_plain(cells[1][0]).split()))


def _code(language: str, text: str, document: _Document, line: int) -> None:
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


def _raw(text: str, document: _Document, line: int) -> None:
    """Take links, the title and the words of raw HTML."""
    for target in _HTML_LINK.findall(text):
        document.links.append((html.unescape(target), line))
    title = _HTML_TITLE.search(text)
    if title and not document.title:
        document.title = " ".join(html.unescape(_TAG.sub(" ", title.group(1))).split())
    document.part.words |= identifiers(_TAG.sub(" ", text))
    if re.search(r"<\s*(?:script|iframe|object|embed)\b|\bon\w+\s*=|javascript:", text, re.IGNORECASE):
        document.find("security", "raw HTML that can run code", text, line)


# reStructuredText

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1{2,}\s*$")
_DIRECTIVE = re.compile(r"(\s*)\.\. (?:\|[^|]+\| )?([\w:+.-]+)::\s*(.*)")
_TARGET = re.compile(r"\s*\.\. _(?:[^:\\]|\\.)+:\s*(\S*)")
_LITERAL = re.compile(
    r"code|code-block|sourcecode|parsed-literal|math|prompt|doctest|testcode|testsetup|testoutput|ipython|raw|graphviz"
    r"|mermaid|productionlist|highlight|literalinclude|csv-table|toctree|tikz|uml|plot"
)
_FILES = {"image", "figure", "include", "literalinclude", "download", "thumbnail"}
_INLINE = re.compile(
    r"``(?P<code>[^`]+)``|:(?P<role>[\w:+.-]+):`(?P<text>[^`]+)`|`(?P<title>[^`<]*)<(?P<link>[^`>]+)>`__?"
    r"|\*\*(?P<strong>[^*\s][^*]*)\*\*|(?<![\w*])\*(?P<emphasis>[^*\s][^*]*)\*(?!\w)|(?P<url>https?://[^\s<>`\"']+)"
)


def read_rst(facts: Facts) -> Facts:
    """Return the facts of a document of reStructuredText.

    Args:
        facts: Its path and text.

    Returns:
        The same with title, first paragraph, sections with their terms, and links.
    """
    document = _Document()
    lines = facts.text.splitlines()
    styles: list[tuple[str, bool]] = []
    paragraph: list[str] = []
    literal: int | None = None
    """Indentation of the line above a literal block, whose markup is none."""
    tree = False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal, tree = None, False
        if literal is not None:
            document.part.words |= identifiers(line)
            if tree and line.strip() and not line.strip().startswith(":"):
                _entry(line.strip(), document, number + 1)
            continue
        style = _heading(lines, number)
        if style:
            if style not in styles:
                styles.append(style)
            document.head(_INLINE.sub(_shown, line.strip()), styles.index(style) + 1, number + 1)
            continue
        directive = _DIRECTIVE.match(line)
        if directive:
            name, argument = directive.group(2), directive.group(3)
            if name in _FILES and argument:
                document.links.append((argument, number + 1))
            document.part.words |= identifiers(argument)
            if _LITERAL.fullmatch(name):
                literal, tree = indent, name == "toctree"
                if name in ("code", "code-block", "sourcecode") and argument:
                    document.find(
                        "pattern", f"example in {argument.split()[0]}", _next(lines, number), number + 1
                    )
            continue
        _rst_line(line, document, number + 1)
        _rst_definition(lines, number, document)
        if line.strip() and not line.lstrip().startswith(("..", ":", "+-", "|", "==")) and not _adorns(line):
            paragraph.append(_INLINE.sub(_shown, line.strip()))
        if paragraph and (not line.strip() or number + 1 == len(lines) or _heading(lines, number + 1)):
            document.say(" ".join(paragraph).removesuffix("::"))
            paragraph = []
        if line.rstrip().endswith("::"):
            literal = indent
    return document.facts(facts)


def _adorns(line: str) -> bool:
    return bool(_ADORNMENT.match(line))


def _heading(lines: list[str], number: int) -> tuple[str, bool] | None:
    """Return the sign below a title and whether it stands above, too; None if the line is no title."""
    line = lines[number] if number < len(lines) else ""
    below = lines[number + 1] if number + 1 < len(lines) else ""
    above = lines[number - 1] if number else ""
    if not line.strip() or _adorns(line) or not _adorns(below):
        return None
    if len(below.rstrip()) < min(4, len(line.strip())):
        return None
    over = _adorns(above) and above[0] == below[0]
    if not over and (line[0] == " " or above.strip()):
        return None
    return below[0], over


def _shown(found: re.Match[str]) -> str:
    """Return inline markup as its text."""
    groups = found.groupdict()
    if groups["role"]:
        return _role_text(groups["text"])
    return next(
        (groups[key] for key in ("code", "title", "strong", "emphasis", "url") if groups[key]), ""
    ).strip()


def _role_text(text: str) -> str:
    """Return what a role shows: the title of "title <target>", or the name without ~ and !."""
    titled = re.fullmatch(r"(.*?)\s*<[^<>]*>", text)
    return titled.group(1) if titled and titled.group(1) else text.lstrip("~!")


def _rst_line(line: str, document: _Document, number: int) -> None:
    """Take the inline markup of a line."""
    target = _TARGET.match(line)
    if target and target.group(1):
        document.links.append((target.group(1), number))
        return
    document.part.words |= identifiers(line)
    for found in _INLINE.finditer(line):
        groups = found.groupdict()
        if groups["code"]:
            document.part.add(code_term(groups["code"]), "code", number)
        elif groups["role"]:
            document.part.add(code_term(_role_text(groups["text"])), "code", number)
            linked = re.search(r"<([^<>]+)>$", groups["text"])
            if groups["role"] in ("doc", "download"):
                document.links.append((linked.group(1) if linked else groups["text"], number))
        elif groups["link"] or groups["url"]:
            document.links.append(((groups["link"] or groups["url"]).rstrip(".,);"), number))
        else:
            document.part.add(term(groups["strong"] or groups["emphasis"]), "emphasised", number)


def _rst_definition(lines: list[str], number: int, document: _Document) -> None:
    """Take an element of a definition list: a line, and its meaning indented below it."""
    line = lines[number]
    below = lines[number + 1] if number + 1 < len(lines) else ""
    above = lines[number - 1] if number else ""
    if line[:1].isalnum() or line[:1] in "`*":
        if not above.strip() and below.strip() and below[0] == " " and not line.rstrip().endswith(":"):
            word = term(_INLINE.sub(_shown, line.partition(" : ")[0]))
            if not re.match(r"\d+[.)]|\* ", line):
                document.part.add(word, "defined", number + 1, _INLINE.sub(_shown, below.strip()))


def _entry(text: str, document: _Document, line: int) -> None:
    """Take an entry of a table of contents, with or without a title."""
    titled = re.fullmatch(r".*<([^<>]+)>", text)
    document.links.append((titled.group(1) if titled else text, line))


def _next(lines: list[str], number: int) -> str:
    inside = (line.strip() for line in lines[number + 1 : number + 20])
    return next((line for line in inside if line and not line.startswith(":")), "")


# Notebooks


def read_notebook(facts: Facts) -> Facts:
    """Return the facts of a notebook.

    Args:
        facts: Its path and text.

    Returns:
        The same with the cells as a script for `text`, in which lines are counted: code as it is, Markdown as
        comments, outputs as their size. Sections are the headings of its Markdown; imports and definitions
        those of its Python code.
    """
    try:
        notebook = json.loads(facts.text)
        cells = [cell for cell in notebook["cells"] if isinstance(cell, dict)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return replace(facts, problem=f"not a notebook of version 4: {type(error).__name__}: {error}"[:200])
    document, shown, code = _Document(), [], []
    for number, cell in enumerate(cells, 1):
        source, kind = _source(cell.get("source")), str(cell.get("cell_type"))
        shown.append(f"# %% {'' if kind == 'code' else f'[{kind}] '}cell {number}")
        code.append("")
        rows = source.splitlines()
        if kind == "code":
            document.part.words |= identifiers(source)
            shown += rows
            code += _python(rows)
        else:
            if kind == "markdown":
                _read_markdown(source, document, len(shown))
            shown += [f"# {row}".rstrip() for row in rows]
            code += [""] * len(rows)
        size = len(json.dumps(cell.get("outputs") or []))
        if cell.get("outputs"):
            shown.append(f"# output of cell {number}: {size:,} bytes, not shown")
            code.append("")
    found = document.facts(replace(facts, text="\n".join(shown) + "\n", lexer="python"))
    return _with_python(found, "\n".join(code) + "\n") if _language(notebook) == "python" else found


def _source(source: Any) -> str:
    """Return the text of a cell, which is a text or a list of lines."""
    return "".join(map(str, source)) if isinstance(source, list) else str(source or "")


def _language(notebook: dict[str, Any]) -> str:
    metadata = notebook.get("metadata")
    for key in ("language_info", "kernelspec"):
        told = metadata.get(key) if isinstance(metadata, dict) else None
        if isinstance(told, dict):
            return "python" if "python" in str(told.get("name", "")).lower() else str(told.get("name", ""))
    return "python"


def _python(rows: list[str]) -> list[str]:
    """Return the rows of a cell as Python: without magics, and blank if it is no Python."""
    if rows and rows[0].startswith("%%"):
        return [""] * len(rows)
    plain = [re.sub(r"^(\s*)[%!?].*", r"\1pass", row) for row in rows]
    try:
        ast.parse("\n".join(plain))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [""] * len(rows)
    return plain


def _with_python(facts: Facts, text: str) -> Facts:
    """Add what the reader of Python finds in the code cells."""
    try:
        from repopages.reading.python import read as read_python
    except ImportError:
        return facts
    found = read_python(replace(facts, language="Python", text=text))
    kept = ("language", "text", "doc", "title", "sections", "links")
    findings = tuple(sorted(facts.findings + found.findings, key=lambda finding: finding.line))
    return replace(found, findings=findings, **{name: getattr(facts, name) for name in kept})


# Plain text

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
    document = _Document()
    for line, paragraph in _paragraphs(facts.text):
        if not document.title and len(paragraph) <= 100:
            document.title = paragraph
            document.parts.append(_Part(paragraph, 1, line, ""))
        else:
            document.say(paragraph)
        document.links += [
            (url.rstrip(".,);"), line) for url in re.findall(r"https?://[^\s<>\"']+", paragraph)
        ]
    return document.facts(facts)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text on one line each, with their first line; rules are left out."""
    start, rows = 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not _adorns(line):
            start = start if rows else number
            rows.append(line.strip())
        elif rows:
            yield start, " ".join(rows)
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
    return replace(
        facts, imports=tuple(imports), links=tuple(links), doc=" ".join(notes).strip()[:_PARAGRAPH]
    )


DOCUMENTS: dict[str, Callable[[Facts], Facts]] = {
    "Markdown": read_markdown,
    "reStructuredText": read_rst,
    "Notebook": read_notebook,
    "Text": read_text,
}
"""The readers of documents by language."""
