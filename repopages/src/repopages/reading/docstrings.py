"""Docstrings as Markdown: the sections of Google, NumPy and reStructuredText, their markup and plain text.

Docstrings mix these styles with Markdown, and few are valid in any of them, so the parser accepts any line.
The result is CommonMark with GitHub's alerts. All text of a docstring is escaped: HTML, Markdown and
directives in it are shown, not obeyed.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Link(Protocol):
    """Makes the Markdown of a name in a docstring, with a link if the name is known."""

    def __call__(self, code: str, shown: str = "") -> str:
        """Return Markdown.

        Args:
            code: The name, or any other code.
            shown: Text to show in place of it.
        """


class Field(NamedTuple):
    """An entry of Args, Returns or Raises.

    Attributes:
        kind: "param", "attribute", "returns", "yields", "raises" or "warns".
        name: Name of the parameter, attribute or error. Empty for results.
        type: Its type as the docstring has it, or an empty text.
        text: Its description, as the docstring has it.
    """

    kind: str
    name: str
    type: str
    text: str


@dataclass
class Docstring:
    """A docstring in parts, all in the markup of the docstring.

    Attributes:
        summary: Its first paragraph.
        body: The paragraphs after it, without sections.
        fields: Entries of Args, Attributes, Returns, Yields and Raises.
        texts: Other sections by lower-case title, such as "example" and "note".
    """

    summary: str = ""
    body: str = ""
    fields: list[Field] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)


def _by_word(words: dict[str, str]) -> dict[str, str]:
    """Return the keys of a table by each of the words in its values, which commas separate."""
    return {word: key for key, listed in words.items() for word in listed.split(", ")}


_FIELDS = _by_word(
    {
        "param": "args, arg, arguments, parameters, parameter, params, other parameters, keyword args,"
        " keyword arguments, kwargs",
        "attribute": "attributes, attribute",
        "returns": "returns, return",
        "yields": "yields, yield",
        "raises": "raises, raise, exceptions",
        "warns": "warns",
    }
)
"""Titles of sections that list parameters, results and errors."""

_EXAMPLES = ("example", "examples", "usage")
_TEXTS = _by_word(
    {
        "text": "example, examples, usage, performance, safety, note, notes, warning, warnings, see also,"
        " references, shape, inputs, outputs, todo, tip, caution, important, variables"
    }
)
"""Titles of other sections."""

_REST_FIELDS = _by_word(
    {
        "param": "param, parameter, arg, argument, key, keyword, kwarg",
        "attribute": "ivar, var, cvar, attribute",
        "returns": "return, returns, rtype",
        "yields": "yield, yields, ytype",
        "raises": "raise, raises, except, exception",
        "warns": "warns",
    }
)
_ALERTS = _by_word(
    {
        "NOTE": "note, todo, admonition, topic, seealso",
        "TIP": "tip, hint",
        "IMPORTANT": "important",
        "WARNING": "warning, attention",
        "CAUTION": "caution, danger, error",
    }
)
_VERSIONS = _by_word(
    {
        "Added in version": "versionadded, version-added",
        "Changed in version": "versionchanged, version-changed",
        "Deprecated since version": "deprecated, version-deprecated, deprecated-removed",
        "Removed in version": "versionremoved, version-removed",
    }
)
_DIRECTIVES = _by_word(
    {
        "code": "code-block, code, sourcecode, ipython, prompt, testcode, doctest, testsetup",
        "text": "parsed-literal, testoutput, raw, table, list-table, csv-table, graphviz",
        "nothing": "currentmodule, module, index, highlight, contents, default-role, toctree, plot, meta",
        "file": "image, figure, include, literalinclude",
        "object": "function, class, method, attribute, data, exception",
    }
)

_TITLE = re.compile(r"(?P<title>[A-Z][a-z]+(?: [A-Za-z]+)?) ?(?P<colons>::?)$")
_HEADING = re.compile(r"#{1,6} +(?P<title>\S.*?) *#*$")
_RULE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}$")
_TYPE = r"(?:\s*\((?P<type>.*?)\))?"
_ENTRY = re.compile(
    rf"(?P<name>\*{{0,2}}[\w.`*\\\[\]/-]+(?:,\s*\*{{0,2}}[\w.`]+)*){_TYPE}\s*:(?:\s+(?P<text>.*))?$"
)
_RESULT = re.compile(
    r"(?P<type>[\w.]+(?:\[.*?\])?(?: \| \w+| or \w+)?|:[\w:]+:`[^`]+`|`[^`]+`)\s*:\s+(?P<text>.*)$"
)
_REST = re.compile(r":(?P<kind>[a-z]+)(?P<words>(?: [^:`]+)?):(?: +(?P<text>.*))?$")
_DIRECTIVE = re.compile(r"\.\. ?(?P<name>[\w:+-]+) ?::(?: +(?P<argument>.*))?$")
_ITEM = re.compile(r"(?P<mark>[-*+•]|\(?(?:\d{1,3}|#)[.)])(?P<gap> +)(?=\S)")
_TABLE = re.compile(r"\+[-=+]{3,}\+$|={2,}( +={2,})+$|\|.*\|$")
_ART = re.compile(r"[├└│┌─▶→]{1}")


def parse(doc: str) -> Docstring:
    """Split a docstring, as `ast.get_docstring` returns it, into its parts."""
    made, prose = Docstring(), list[str]()
    for title, colons, lines in _sections(doc.expandtabs().splitlines()):
        text = textwrap.dedent("\n".join(lines)).strip("\n")
        if title in _FIELDS:
            made.fields += _entries(_FIELDS[title], text, numpy=colons == "")
        elif title:
            if title == "see also" and not colons:
                text = re.sub(r"^(\S[^:\n]*?)(?: :)?(?: +:)? (?=\S)|^(\S+)$", r"- `\1\2`: ", text, flags=re.M)
            elif (colons == "::" or (title in _EXAMPLES and _is_code(text))) and not _is_mixed(text):
                text = "::\n\n" + textwrap.indent(text, "    ")
            made.texts[title] = f"{made.texts[title]}\n\n{text}" if title in made.texts else text
        else:
            prose += lines
    text = "\n".join(_without_fields(prose, made)).strip("\n")
    # The first paragraph ends at a blank line, or where a list or code begins without one.
    first, *rest = re.split(r"\n(?=\s*\n|>>> |```|[-*] |\.\. )", text, maxsplit=1)
    if re.match(r"\.\. |>>> |```|[-*+] ", first):
        made.body = text
    else:
        made.summary, made.body = " ".join(first.split()), "".join(rest).strip("\n")
    if made.summary.endswith("::"):
        made.summary, made.body = made.summary[:-1], f"::\n\n{made.body}"
    return made


def _sections(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (title, colons, lines) of every section; the title of plain text is empty."""
    title, colons, held, fenced = "", "", list[str](), False
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        heading = None if fenced else _HEADING.match(line)
        following = lines[number + 1] if number + 1 < len(lines) else ""
        found = _TITLE.match(line)
        name = (found["title"] if found else heading["title"] if heading else line.strip()).lower()
        ruled = not fenced and not following.startswith("```") and line[:1].strip() != ""
        underlined = bool(heading or (ruled and _RULE.match(following)))
        indented = next((text for text in lines[number + 1 :] if text.strip()), "").startswith(" ")
        if (name in _TEXTS if heading else name in _FIELDS or name in _TEXTS) and (
            underlined or (found and indented)
        ):
            yield title, colons, held
            title, colons, held = name, "" if underlined else found["colons"] if found else "", []
        elif title and colons == "" and not held and _RULE.match(line):
            continue  # the rule below a heading of NumPy's style
        elif title and line and not line.startswith(" ") and (colons or underlined or line.startswith(".. ")):
            # A section of Google's style ends where the indentation does, one of NumPy's at the next heading.
            yield title, colons, held
            title, colons, held = "", "", [line]
        else:
            held.append(line)
    yield title, colons, held


def _entries(kind: str, text: str, *, numpy: bool) -> Iterator[Field]:
    """Yield a section's entries."""
    lines = text.splitlines()
    if kind in ("returns", "yields") and not numpy:
        first, _, rest = text.partition("\n")
        found = _RESULT.match(first)
        yield (
            Field(kind, "", found["type"], _joined([found["text"], *rest.splitlines()]))
            if found
            else Field(kind, "", "", text)
        )
        return
    name, of_type, held = "", "", list[str]()
    for line in lines:
        entry = _entry(kind, line, numpy=numpy)
        if entry:
            if name or of_type or any(held):
                yield Field(kind, name, of_type, _joined(held))
            name, of_type, held = entry[0], entry[1], [entry[2]]
        else:
            held.append(line)
    if name or of_type or any(held):
        yield Field(kind, name, of_type, _joined(held))


def _entry(kind: str, line: str, *, numpy: bool) -> tuple[str, str, str] | None:
    """Return (name, type, text) if a line begins an entry."""
    if not line.strip() or line.startswith((" ", ".. ")):
        return None
    if numpy:
        name, colon, of_type = line.partition(" : ")
        if kind in ("returns", "yields"):
            return ("", of_type or name, "") if colon else ("", line, "")
        return _bare(name.rstrip(" :")), of_type.strip(), ""
    found = _ENTRY.match(re.sub(r"^[-*] +", "", line))
    return (_bare(found["name"]), found["type"] or "", found["text"] or "") if found else None


def _bare(name: str) -> str:
    return re.sub(r"[`\\]", "", name).strip()


def _joined(lines: list[str]) -> str:
    first, *rest = lines or [""]
    return "\n".join([first, textwrap.dedent("\n".join(rest))]).strip("\n")


def _without_fields(lines: list[str], made: Docstring) -> list[str]:
    """Take the fields of reStructuredText, such as `:param x: ...`, out of the text."""
    kept: list[str] = []
    types: dict[str, str] = {}
    held: list[str] | None = None
    found: list[tuple[str, str, str, list[str]]] = []
    for line in lines:
        match = _REST.match(line)
        if match and (match["kind"] in _REST_FIELDS or match["kind"] == "type"):
            words = match["words"].split()
            held = [match["text"] or ""]
            if match["kind"] in ("type", "rtype", "ytype"):
                types[match["kind"] if match["kind"] != "type" else " ".join(words)] = held[0]
                continue
            kind = _REST_FIELDS[match["kind"]]
            single = kind in ("raises", "warns") or len(words) < 2
            name, of_type = (" ".join(words), "") if single else (words[-1], " ".join(words[:-1]))
            found.append((kind, name, of_type, held))
        elif held is not None and (line.startswith(" ") or not line.strip()):
            held.append(line)
        else:
            held = None
            kept.append(line)
    for word, kind in (("rtype", "returns"), ("ytype", "yields")):
        if word in types and not any(entry[0] == kind for entry in found):
            found.append((kind, "", types[word], []))
    for kind, name, of_type, text in found:
        known = {"returns": types.get("rtype", ""), "yields": types.get("ytype", "")}.get(
            kind, types.get(name, "")
        )
        made.fields.append(Field(kind, _bare(name), of_type or known, _joined(text)))
    return kept


def markdown(text: str, link: Link, *, nested: bool = False) -> str:
    """Return paragraphs, lists, notes and code blocks as Markdown.

    Args:
        text: Part of a docstring.
        link: Makes the code spans.
        nested: Whether the result is put into a list or quote, where GitHub shows no alerts.
    """
    lines = textwrap.dedent(text).expandtabs().splitlines()
    return "\n\n".join(block for block in _Blocks(lines, link, nested) if block)


class _Blocks:
    """The blocks of a text, one after the other.

    Args:
        lines: The text, without common indentation.
        link: Makes the code spans.
        nested: Whether alerts are quotes.
    """

    def __init__(self, lines: list[str], link: Link, nested: bool) -> None:
        self._lines = [line.rstrip() for line in lines]
        self._link = link
        self._nested = nested
        self._at = 0

    def __iter__(self) -> Iterator[str]:
        literal = False  # whether the paragraph before ended with `::`
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if not line:
                self._at += 1
                continue
            if line.startswith(" "):
                lines = self._indented(0)
                text = "\n".join(lines)
                is_code = (literal or _is_code(text)) and not _is_mixed(text)
                yield code(text) if is_code else self._inner(lines)
                literal = False
                continue
            literal = False
            if line.startswith((">>>", "```", "~~~", "..")) or _ITEM.match(line):
                yield self._special(line)
            elif heading := _HEADING.match(line):
                self._at += 1
                yield f"**{inline(heading['title'], self._link)}**"
            elif _TABLE.match(line):
                yield code("\n".join(self._until_blank()), "text")
            elif _RULE.match(line):
                self._at += 1
            elif _RULE.match(self._peek(1)) and len(self._peek(1)) >= min(len(line) - 1, 4):
                self._at += 2
                yield f"**{inline(line, self._link)}**"
            else:
                literal, block = self._paragraph()
                yield block

    def _peek(self, ahead: int) -> str:
        return self._lines[self._at + ahead] if self._at + ahead < len(self._lines) else ""

    def _inner(self, lines: list[str]) -> str:
        return markdown("\n".join(lines), self._link, nested=True)

    def _until_blank(self) -> list[str]:
        start = self._at
        while self._at < len(self._lines) and self._lines[self._at]:
            self._at += 1
        return self._lines[start : self._at]

    def _indented(self, least: int) -> list[str]:
        """Take the following lines that are blank or indented by more than `least`."""
        start = self._at
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line and len(line) - len(line.lstrip()) <= least:
                break
            self._at += 1
        return self._lines[start : self._at]

    def _special(self, line: str) -> str:
        if line.startswith(">>>"):
            return self._session()
        if line.startswith(("```", "~~~")):
            return self._fence(line)
        return self._directive(line) if line.startswith("..") else self._list()

    def _session(self) -> str:
        """Take a doctest. Blank lines before another prompt belong to it."""
        lines = self._until_blank()
        while self._peek(0) == "" and self._peek(1).startswith(">>>"):
            self._at += 1
            lines += ["", *self._until_blank()]
        return code("\n".join(lines), "pycon")

    def _fence(self, line: str) -> str:
        mark = re.match(r"`+|~+", line)
        end = mark.group() if mark else line
        start = self._at = self._at + 1
        while self._at < len(self._lines) and not self._lines[self._at].startswith(end):
            self._at += 1
        self._at += 1
        word = re.match(r"[\w+-]+", line[len(end) :].strip())
        return code("\n".join(self._lines[start : self._at - 1]), word.group() if word else "")

    def _list(self) -> str:
        items: list[str] = []
        ordered = self._lines[self._at][:1] not in "-*+•"
        while (found := _ITEM.match(self._peek(0))) and (found["mark"] not in "-*+•") == ordered:
            held = [self._lines[self._at][found.end() :]]
            self._at += 1
            # Lines directly below belong to the item, even if they are not indented.
            while (
                (line := self._peek(0))
                and not line.startswith((" ", ">>>", "```", ".."))
                and not _ITEM.match(line)
            ):
                held.append(line)
                self._at += 1
            rest = self._indented(0)
            number = re.sub(r"\D", "", found["mark"]) or str(len(items) + 1)
            mark = f"{number}." if ordered else "-"
            width = len(mark) + 1
            body = self._inner([*held, *textwrap.dedent("\n".join(rest)).splitlines()])
            items.append(f"{mark} {textwrap.indent(body, ' ' * width)[width:]}")
            while not self._peek(0) and self._at < len(self._lines):
                self._at += 1
        loose = any("\n\n" in item for item in items)
        return ("\n\n" if loose else "\n").join(items)

    def _paragraph(self) -> tuple[bool, str]:
        """Take a paragraph, with what belongs to it without a blank line between."""
        held = [self._lines[self._at]]
        self._at += 1
        while line := self._peek(0):
            if line.startswith((">>>", "```", "~~~", ".. ")) or _TABLE.match(line) or _HEADING.match(line):
                break
            found = _ITEM.match(line)
            if found and (found["mark"] in "-*•" or found["mark"].strip("().") == "1"):
                break
            if line.startswith(" ") and (len(held) == 1 or held[-1].endswith(":")):
                break
            held.append(line)
            self._at += 1
        if any(_ART.search(line) for line in held[1:]):
            return False, code("\n".join(held), "text")
        text = " ".join(line.strip() for line in held)
        below = self._peek(0).startswith(" ")
        if below and len(held) == 1 and not text.endswith((":", ",")):
            return False, self._definition(text)
        literal = text.endswith("::")
        return literal, inline(
            re.sub(r"\s*::$", "" if text == "::" or text.endswith(" ::") else ":", text), self._link
        )

    def _definition(self, term: str) -> str:
        """Take the lines below a term. A long one is a sentence that goes on with a hanging indent."""
        lines = self._indented(0)
        if len(term) > 60:
            return inline(" ".join([term, *(line.strip() for line in lines)]), self._link)
        body = textwrap.dedent("\n".join(lines))
        shown = code(body) if _is_code(body) else markdown(body, self._link, nested=True)
        return f"- **{inline(term, self._link)}**\n\n{textwrap.indent(shown, '  ')}"

    def _directive(self, line: str) -> str:
        self._at += 1
        body = textwrap.dedent("\n".join(self._indented(0))).strip("\n").splitlines()
        found = _DIRECTIVE.match(line)
        if not found:  # a target, footnote, substitution or comment
            note = re.match(r"\.\. \[(?P<label>[^\]]+)\] *(?P<text>.*)", line)
            text = " ".join([note["text"], *(part.strip() for part in body)]) if note else ""
            return inline(f"[{note['label']}] {text}", self._link) if note else ""
        name, argument = found["name"].rpartition(":")[2], found["argument"] or ""
        while body and re.match(r":[\w-]+:", body[0]):
            body = body[1:]  # options
        while body and not body[0]:
            body = body[1:]
        return self._directed(name, argument, body)

    def _directed(self, name: str, argument: str, body: list[str]) -> str:
        text = "\n".join(body)
        if name in _ALERTS:
            return self._alert(name, argument, text)
        if name in _VERSIONS:
            version, _, more = argument.partition(" ")
            said = self._inner([more, *body]) if more or body else ""
            return f"*{_VERSIONS[name]} {escape(version)}.* {said}".rstrip()
        if name == "math":
            return code("\n".join(filter(None, [argument, text])), "latex")
        kind = "object" if name.startswith("auto") else _DIRECTIVES.get(name, "")
        inner = self._inner(body)
        if kind == "code":
            known = re.fullmatch(r"[\w+-]+", argument.strip())
            return code(text, known.group() if known else "")
        if kind == "text":
            title = f"**{inline(argument, self._link)}**" if argument and name != "raw" else ""
            return "\n\n".join(filter(None, [title, code(text, "text") if text.strip() else ""]))
        if kind == "nothing":
            return ""
        if name == "rubric":
            return f"**{inline(argument, self._link)}**"
        if kind == "file":
            head = f"{name.capitalize()}: {span(argument)}"
        elif kind == "object":
            head = self._link(argument) if re.fullmatch(r"[\w.]+", argument) else span(argument)
        else:
            head = inline(argument, self._link)
        return "\n\n".join(filter(None, [head, inner]))

    def _alert(self, name: str, argument: str, text: str) -> str:
        titled = name in ("admonition", "topic")
        title = argument if titled else {"seealso": "See also"}.get(name, name.capitalize())
        body = self._inner(([] if titled or not argument else [argument]) + text.splitlines())
        if self._nested:
            head = f"**{escape(title)}**\n\n"
        elif titled or name in ("seealso", "todo"):
            head = f"[!{_ALERTS[name]}]\n**{escape(title)}**\n\n"
        else:
            head = f"[!{_ALERTS[name]}]\n"
        return textwrap.indent(f"{head}{body}", "> ", lambda line: True).replace("> \n", ">\n")


_INLINE = re.compile(
    r"""
      ``(?P<half>[\w.()]+)`(?=[\s.,;:)]|$)
    | (?P<literal>(?P<ticks>``+)(?P<inner>.+?)(?P=ticks)(?!`))
    | :(?P<role>[a-zA-Z][\w:+.-]*):[ ]?`(?P<said>[^`]+)['`]
    | `(?P<title>[^`<]+?)\s*<(?P<target>[^`<>\s]+)>`_{1,2}
    | `(?P<code>[^`]+)`(?:_{1,2}(?!\w))?
    | \[(?P<words>[^\[\]]+)\]\((?P<address>https?://[^\s()<>]+)\)
    | <?(?P<url>https?://[^\s<>`"'|\\\]}]*[^\s<>`"'|\\\]}.,;:!?)*_])>?
    | \[(?P<foot>\d+|\#\w*|\w+)\]_(?!\w)
    | (?<![\w*\\])\*\*(?=[^\s*])(?P<strong>[^*]+?)(?<=\S)\*\*(?![\w*])
    | (?<![\w*\\])\*(?=[^\s*])(?P<emphasis>[^*]+?)(?<=[^\s,(])\*(?![\w*])
    | \\(?P<escaped>[*`_|\\<>\[\]])
    | \\(?P<nothing>\s)
    """,
    re.VERBOSE | re.DOTALL,
)
_SPECIAL = re.compile(r"([\\`*{}\[\]<>|$~&#]|(?<![^\W_])_|_(?![^\W_]))")
_PLAIN_ROLES = (
    "ref",
    "doc",
    "term",
    "numref",
    "abbr",
    "guilabel",
    "menuselection",
    "dfn",
    "sub",
    "sup",
    "eq",
    "cite",
)
_SPAN_ROLES = (
    "math",
    "code",
    "literal",
    "file",
    "samp",
    "kbd",
    "command",
    "program",
    "option",
    "envvar",
    "token",
)


def inline(text: str, link: Link) -> str:
    """Return one paragraph as a line of Markdown. Code spans are linked, other text is escaped.

    Args:
        text: The paragraph, in the markup of the docstring.
        link: Makes the code spans.
    """
    text, made, end = " ".join(text.split()), list[str](), 0
    for found in _INLINE.finditer(text):
        made += [escape(text[end : found.start()]), _marked(found, link)]
        end = found.end()
    made.append(escape(text[end:]))
    # At its start, a paragraph must not look like a list, a heading or a rule.
    return re.sub(r"^([-+=]|\d+(?=[.)]))", lambda mark: _harmless(mark[1]), "".join(made))


def _harmless(mark: str) -> str:
    return f"{mark}\\" if mark.isdigit() else f"\\{mark}"


def _marked(found: re.Match[str], link: Link) -> str:
    if found["literal"] or found["half"]:
        return link((found["inner"] or found["half"]).strip())
    if found["role"]:
        return _role(found["role"].rpartition(":")[2].lower(), found["said"].strip(), link)
    if found["title"]:
        title, target = found["title"], found["target"]
        return _linked(title, target) if target.startswith(("http://", "https://")) else escape(title)
    if found["code"]:
        return link(found["code"].strip()) if found["code"].strip() else escape(found.group())
    if found["words"]:
        return _linked(found["words"].replace("`", ""), found["address"])
    if found["url"]:
        return f"<{found['url']}>"
    if found["foot"]:
        return escape(f"[{found['foot']}]")
    for mark, group in (("**", "strong"), ("*", "emphasis")):
        if found[group]:
            return f"{mark}{inline(found[group], link)}{mark}"
    return escape(found["escaped"] or "")


def _role(role: str, said: str, link: Link) -> str:
    titled = re.fullmatch(r"(?P<title>.+?)\s*<(?P<target>[^<>]+)>", said, re.DOTALL)
    if role in _SPAN_ROLES:
        return span(said)
    if role in ("strong", "emphasis"):
        mark = "**" if role == "strong" else "*"
        return f"{mark}{escape(said)}{mark}"
    if role in ("pep", "rfc"):
        return escape(titled["title"] if titled else f"{role.upper()} {said}")
    if role in _PLAIN_ROLES:
        return escape(titled["title"] if titled else said)
    if said.startswith("!"):
        return span(said[1:])
    if titled:
        return link(titled["target"].lstrip("~.!"), titled["title"])
    name = said.lstrip("~.")
    return link(name, name.rpartition(".")[2]) if said.startswith("~") else link(name)


def _linked(title: str, address: str) -> str:
    return f"[{escape(title)}](<{address}>)"


def escape(text: str) -> str:
    """Return text with everything escaped that Markdown would take for markup inside a line."""
    return _SPECIAL.sub(r"\\\1", text)


def span(text: str) -> str:
    """Return a code span that its content cannot end."""
    text = " ".join(text.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}" if text else ""


def code(text: str, language: str = "") -> str:
    """Return a fenced block that its content cannot end.

    Args:
        text: The code.
        language: Its language. Without one it is a session if it has prompts, Python if it parses, or text.
    """
    text = textwrap.dedent(text).strip("\n")
    if re.match(r"\s*>>> ?", text):
        language = "pycon"
        # Instructions to doctest are not for readers.
        text = re.sub(r"^>>> # x?doctest:.*\n|[ ]*# x?doctest: ?\+.*$", "", text, flags=re.M)
    elif not language:
        language = "python" if _parsed(text) is not None else "text"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_mixed(text: str) -> bool:
    """Tell whether a block has sessions and, between them, text."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n"))
    prompts = [paragraph.startswith(">>>") for paragraph in paragraphs]
    return any(prompts) and not all(prompts)


def _is_code(text: str) -> bool:
    """Tell whether an indented block without a mark is code rather than text."""
    text = textwrap.dedent(text).strip("\n")
    if re.match(r"(>>>|\$ |% |# )", text):
        return True
    if _ITEM.match(text) or text.startswith((".. ", ":")) or ">>> " in text:
        return False
    tree = _parsed(text)
    if tree is not None:
        telling = (
            ast.Assign,
            ast.AugAssign,
            ast.Import,
            ast.ImportFrom,
            ast.Call,
            ast.For,
            ast.With,
            ast.ClassDef,
        )
        return any(isinstance(node, (*telling, ast.FunctionDef, ast.Attribute)) for node in ast.walk(tree))
    plain = re.sub(r"(:[\w:]+:)?`+[^`]*`+", "", text)
    return len(re.findall(r"[=(){}\[\]<>;$|/\\_!├└│@]", plain)) > 0.08 * max(1, len(plain))
