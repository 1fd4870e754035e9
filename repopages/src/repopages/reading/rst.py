"""reStructuredText, read line by line: no directive is run and no file is included."""

import re

from repopages.reading.model import Facts
from repopages.reading.outline import Outline, code_term, identifiers, term

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1{2,}\s*$")
_DIRECTIVE = re.compile(r"(\s*)\.\. (?:\|[^|]+\| )?([\w:+.-]+)::\s*(.*)")
_TARGET = re.compile(r"\s*\.\. _(?:[^:\\]|\\.)+:\s*(\S*)")
_LITERAL = re.compile(
    r"code|code-block|sourcecode|parsed-literal|math|prompt|doctest|testcode|testsetup|testoutput|ipython|raw|graphviz"
    r"|mermaid|productionlist|highlight|literalinclude|csv-table|toctree|tikz|uml|plot"
)
_FILES = {"image", "figure", "include", "literalinclude", "download", "thumbnail"}
_INLINE = re.compile(
    r"``(?P<code>[^`]+)``|:(?P<role>[\w:+.-]{1,60}):`(?P<text>[^`]{1,300})`|`(?P<title>[^`<]*)<(?P<link>[^`>]+)>`__?"
    r"|\*\*(?P<strong>[^*\s][^*]*)\*\*|(?<![\w*])\*(?P<emphasis>[^*\s][^*]*)\*(?!\w)|(?P<url>https?://[^\s<>`\"']+)"
)


def read_rst(facts: Facts) -> Facts:
    """Return the facts of a document of reStructuredText.

    Args:
        facts: Its path and text.

    Returns:
        The same with title, first paragraph, sections with their terms, and links.
    """
    document = Outline()
    lines = facts.text.splitlines()
    styles: list[tuple[str, bool]] = []
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
        if not line.strip() or _adorns(line):
            continue
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
        if not document.part.text and not line.lstrip().startswith(("..", ":", "+-", "|", "==")):
            document.say(_paragraph(lines, number))
        if line.rstrip().endswith("::"):
            literal = indent
    return document.facts(facts)


def _paragraph(lines: list[str], number: int) -> str:
    """Return the paragraph that starts on a line, without markup."""
    rows = []
    for line in lines[number : number + 40]:
        if not line.strip() or _adorns(line):
            break
        rows.append(line.strip())
    return _INLINE.sub(_shown, " ".join(rows)).removesuffix("::")


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


def _rst_line(line: str, document: Outline, number: int) -> None:
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


def _rst_definition(lines: list[str], number: int, document: Outline) -> None:
    """Take an element of a definition list: a line, and its meaning indented below it."""
    line = lines[number]
    below = lines[number + 1] if number + 1 < len(lines) else ""
    above = lines[number - 1] if number else ""
    starts = re.match(r"(?!\d+[.)] |\* )[\w`*]", line) and not line.rstrip().endswith(":")
    if starts and not above.strip() and below.strip() and below[0] == " ":
        word = term(_INLINE.sub(_shown, line.partition(" : ")[0]))
        document.part.add(word, "defined", number + 1, _INLINE.sub(_shown, below.strip()))


def _entry(text: str, document: Outline, line: int) -> None:
    """Take an entry of a table of contents, with or without a title."""
    titled = re.fullmatch(r".*<([^<>]+)>", text)
    document.links.append((titled.group(1) if titled else text, line))


def _next(lines: list[str], number: int) -> str:
    inside = (line.strip() for line in lines[number + 1 : number + 20])
    return next((line for line in inside if line and not line.startswith(":")), "")
