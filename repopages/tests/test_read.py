"""Any file becomes facts: its text where it is one, and otherwise the reason."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from repopages.reading import read as reading
from repopages.reading.model import Facts
from repopages.reading.read import MOST_TEXT, read
from repopages.reading.workers import read_files


@pytest.mark.parametrize(
    ("name", "data", "encoding", "text"),
    [
        ("a.txt", b"na\xc3\xafve\r\nline\rend", "utf-8", "naïve\nline\nend"),
        ("a.txt", b"\xef\xbb\xbfx", "utf-8-sig", "x"),
        ("a.txt", "ö!".encode("utf-16"), "utf-16", "ö!"),
        ("a.txt", "ö!".encode("utf-32"), "utf-32", "ö!"),
        ("a.txt", "plain".encode("utf-16-le"), "utf-16-le", "plain"),
        ("a.txt", "caf\xe9".encode("latin-1"), "latin-1", "café"),
        ("a.py", b"# coding: cp1252\nx = '\x80'\n", "cp1252", "# coding: cp1252\nx = '€'\n"),
        ("a.py", b"# coding: no-such\nx = '\xe9'\n", "latin-1", "# coding: no-such\nx = 'é'\n"),
        ("a.py", b"# coding: punycode\nx = 1\n", "utf-8", "# coding: punycode\nx = 1\n"),
        ("a.py", b"# coding: rot13\nx = 1\n", "utf-8", "# coding: rot13\nx = 1\n"),
        ("empty.py", b"", "utf-8", ""),
    ],
)
def test_text_is_decoded(tmp_path: Path, name: str, data: bytes, encoding: str, text: str) -> None:
    (tmp_path / name).write_bytes(data)
    facts = read(tmp_path, name)
    assert (facts.encoding, facts.text, facts.hidden) == (encoding, text, "")
    assert facts.size == len(data)


@pytest.mark.parametrize("data", [b"\x00\x01\x02" * 100, bytes(range(256)) * 10, b"\x7fELF\x02\x01\x00\x00"])
@pytest.mark.parametrize("name", ["data", "a.py", "a.txt"])
def test_binary_files_are_not_shown(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    facts = read(tmp_path, name)
    assert (facts.language, facts.hidden, facts.text) == ("Binary", "binary", "")
    assert facts.digest


def test_huge_files_are_listed_and_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge.py", "wb") as file:
        file.write(b"x = 1\n" * 2000)
        file.truncate(5 << 40)  # a sparse file: reading all of it would take hours
    with open(tmp_path / "long.json", "w") as text:
        text.write("[" + "1," * MOST_TEXT + "1]")
    huge = read(tmp_path, "huge.py")
    assert huge.hidden == "5,497,558,138,880 bytes, more than the 1,000,000 that are shown"
    long = read(tmp_path, "long.json")
    assert (long.language, long.items, long.text) == ("JSON", (), "")
    before = long.digest
    os.utime(tmp_path / "long.json", (1, 1))
    assert read(tmp_path, "long.json").digest != before


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with names")
@pytest.mark.timeout(20)
def test_pipes_devices_and_links_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "link.py").symlink_to("/dev/zero")
    (tmp_path / "self").symlink_to("self")
    assert read(tmp_path, "pipe.py").hidden == "a named pipe"
    assert read(tmp_path, "link.py").hidden == "a symbolic link to '/dev/zero'"
    assert read(tmp_path, "self").hidden == "a symbolic link to 'self'"


def test_a_file_that_disappeared_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, "gone.py").problem == "it disappeared"
    (tmp_path / "folder.py").mkdir()
    assert read(tmp_path, "folder.py").hidden == "no regular file"
    assert read(tmp_path, "a" * 300).problem == "File name too long"


def test_an_unreadable_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret.py").write_text("x = 1\n")
    monkeypatch.setattr(os, "open", refuse)
    assert read(tmp_path, "secret.py").problem == "Permission denied"


def test_a_reader_that_fails_leaves_the_facts_of_any_file(tmp_path: Path) -> None:
    def fail(facts: Facts) -> Facts:
        raise KeyError("never thought of")

    def recurse(facts: Facts) -> Facts:
        return recurse(replace(facts))

    (tmp_path / "a.py").write_text("x = 1\n")
    failed = read(tmp_path, "a.py", {"Python": fail})
    assert failed.problem == "the reader failed: KeyError: 'never thought of'"
    assert failed.text == "x = 1\n"
    assert read(tmp_path, "a.py", {"Python": recurse}).problem == "nested too deeply to be read"


_HOSTILE = {
    "deep.py": "x = " + "(" * 5000,
    "minus.py": f"x = {'-' * 20_000}1",
    "chain.py": "x = " + "+".join(["1"] * 20_000),
    "dots.py": "x = a" + ".b" * 20_000,
    "null.py": "x = 1\n" * 3000 + "\0",
    "surrogate.py": "x = '\\ud800'\n",
    "deep.json": "[" * 100_000,
    "deep.yaml": "- " * 50_000,
    "anchors.yaml": "a: &a [x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(100)),
    "deep.md": "> " * 5_000 + "x\n" + "* " * 5_000,
    "deep.c": "{" * 50_000,
    "deep.ts": "<" * 50_000,
    "deep.rs": "fn f() {" * 10_000,
    "deep.toml": "a = " + "[" * 50_000,
    "bad.toml": "a = = 1",
    "bad.ipynb": '{"cells": [1, {"cell_type": "code", "source": 3}]}',
    "list.ipynb": "[]",
    "bad.rst": ".. code-block::\n\n====\n==\n" * 50,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(_HOSTILE))
def test_no_content_stops_the_readers(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(_HOSTILE[name])
    (facts,) = read_files(tmp_path, [name], 1)
    assert facts.size == (tmp_path / name).stat().st_size
    assert facts.hidden in ("", "binary")


def test_every_language_with_a_reader_is_one_that_is_detected() -> None:
    assert set(reading.READERS) >= {"Python", "C", "C++", "Rust", "Go", "JavaScript", "TypeScript", "Shell"}
