"""One file -> its facts: decoded, then read by the reader of its language. No content makes this fail."""

import codecs
import hashlib
import io
import os
import re
import stat
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from repopages.reading import data, documents, languages, notebooks, python, rst
from repopages.reading.detect import language_of
from repopages.reading.model import Facts

MOST_TEXT = 1_000_000
"""Bytes of the longest file whose text is shown and read."""

_HEAD = 8192
_OTHER_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark is the start of this one
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NO_TEXT = frozenset({"idna", "mbcs", "oem", "punycode", "raw_unicode_escape", "undefined", "unicode_escape"})
"""Codecs that a Python file may name but that are no encodings of a source, or take quadratic time."""

Reader = Callable[[Facts], Facts]
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")

READERS: dict[str, Reader] = {
    "Python": python.read,
    "Markdown": documents.read_markdown,
    "reStructuredText": rst.read_rst,
    "Notebook": notebooks.read_notebook,
    "Text": documents.read_text,
    **dict.fromkeys(("TOML", "YAML", "JSON"), data.read_data),
    **dict.fromkeys(languages.LANGUAGES, languages.read),
}
"""The reader of each language. Files of other languages have no facts beyond those of any file."""


def read(root: Path, path: str, readers: Mapping[str, Reader] | None = None) -> Facts:
    """Return the facts of a file, whatever is in it.

    Args:
        root: The repository's folder.
        path: The file's path from there, with "/".
        readers: The reader of each language, instead of `READERS`.

    Returns:
        Its facts. `hidden` says why its text is not shown, `problem` why facts are missing.
    """
    try:
        facts, content = _open(root, path)
    except OSError as error:
        reason = "it disappeared" if isinstance(error, FileNotFoundError) else error.strerror or "unreadable"
        return Facts(path=path, size=0, language="Binary", role="other", hidden=reason, problem=reason)
    if content is None:
        return facts
    facts = _with_text(facts, content)
    reader = (READERS if readers is None else readers).get(facts.language)
    return facts if reader is None or facts.hidden else _understand(facts, reader)


def _understand(facts: Facts, reader: Reader) -> Facts:
    """Return the facts with all that a reader finds in the text."""
    try:
        return reader(facts)
    except (RecursionError, MemoryError):  # Python's parser raises both
        return replace(facts, problem="nested too deeply to be read")
    except Exception as error:  # parsers meet input that none of their authors thought of
        return replace(facts, problem=f"the reader failed: {type(error).__name__}: {error}")


def _open(root: Path, path: str) -> tuple[Facts, bytes | None]:
    """Return the facts of any file, and the content of one that is a text."""
    where = os.path.join(root, path)
    found = os.lstat(where)
    if not stat.S_ISREG(found.st_mode):
        kind = _OTHER_KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        if stat.S_ISLNK(found.st_mode):
            kind = f"a symbolic link to {os.readlink(where)!r}"
        return Facts(
            path=path, size=0, language="Binary", role="other", hidden=kind, digest=_hash(kind)
        ), None
    # The file may have been replaced by a link or a pipe since: follow no link, wait for no writer.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(where, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is no regular file any more")
        head = file.read(_HEAD)
        content = head if found.st_size > MOST_TEXT else head + file.read(MOST_TEXT)
    language, lexer, role = language_of(path, head)
    facts = Facts(path=path, size=found.st_size, language=language, role=role, lexer=lexer)
    if found.st_size > MOST_TEXT:
        # Not read to its end, because it may have gigabytes.
        digest = _hash(f"{found.st_size} {found.st_mtime_ns} {hashlib.sha256(head).hexdigest()}")
        text = language != "Binary" and _decode(head) is not None
        why = f"{found.st_size:,} bytes, more than the {MOST_TEXT:,} that are shown" if text else "binary"
        facts = replace(facts, hidden=why, digest=digest)
        return facts if text else _as_binary(facts), None
    facts = replace(facts, digest=hashlib.sha256(content).hexdigest(), size=len(content))
    return (facts, content) if language != "Binary" else (_as_binary(facts), None)


def _with_text(facts: Facts, content: bytes) -> Facts:
    decoded = _decode(content, declares=facts.language == "Python")
    if decoded is None:
        return _as_binary(facts)
    text, encoding = decoded
    return replace(facts, text=text.replace("\r\n", "\n").replace("\r", "\n"), encoding=encoding)


def _as_binary(facts: Facts) -> Facts:
    return replace(facts, hidden="binary", language="Binary", role="other", lexer="text")


def _decode(content: bytes, *, declares: bool = False) -> tuple[str, str] | None:
    """Return the text and the encoding, or None for bytes that are no text."""
    tried = [encoding for mark, encoding in _MARKS.items() if content.startswith(mark)][:1]
    tried += _declared(content) if declares else []
    tried += _without_mark(content) or ["utf-8"]
    for encoding in tried:
        try:
            text = content.decode(encoding)
        except (UnicodeError, LookupError):
            continue
        return (text, encoding) if "\0" not in text[:_HEAD] else None
    text = content.decode("latin-1")
    # Any bytes are valid Latin-1. Control characters show that they were not meant as text.
    return (text, "latin-1") if len(_CONTROL.findall(text)) * 200 <= len(text) else None


def _declared(content: bytes) -> list[str]:
    """Return the encoding that a Python file declares in its first two lines (PEP 263)."""
    try:
        name = codecs.lookup(tokenize.detect_encoding(io.BytesIO(content).readline)[0]).name
    except (SyntaxError, LookupError, ValueError):
        return []
    return [] if name.replace("-", "_") in _NO_TEXT else [name]


def _without_mark(content: bytes) -> list[str]:
    """Return UTF-16 for text in it without a mark, in which every other byte is zero."""
    head = content[:_HEAD]
    for encoding, zeros, letters in (
        ("utf-16-le", head[1::2], head[::2]),
        ("utf-16-be", head[::2], head[1::2]),
    ):
        if len(head) > 3 and zeros.count(0) > 0.8 * len(zeros) and not letters.count(0):
            return [encoding]
    return []


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
