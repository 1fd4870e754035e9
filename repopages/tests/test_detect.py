"""The language and the role of files."""

import pytest
from repopages.reading.detect import language_of

_FILES = [
    ("src/a.py", b"", ("Python", "python", "source")),
    ("bin/run", b"#!/usr/bin/env -S python3 -u\n", ("Python", "python", "source")),
    ("bin/run", b"#!/bin/sh\n", ("Shell", "bash", "source")),
    ("bin/run", b"#!/usr/bin/perl -w\n", ("Perl", "perl", "source")),
    ("k.cu", b"", ("CUDA", "cuda", "source")),
    ("k.cuh", b"", ("CUDA", "cuda", "source")),
    ("k.hpp", b"", ("C++", "cpp", "source")),
    ("k.h", b"#include <stdio.h>\nint f(void);\n", ("C", "c", "source")),
    ("k.h", b"#include <vector>\n", ("C++", "cpp", "source")),
    ("k.h", b"namespace a {\n", ("C++", "cpp", "source")),
    ("a.mjs", b"", ("JavaScript", "javascript", "source")),
    ("a.tsx", b"", ("TypeScript", "tsx", "source")),
    ("de.ts", b"<?xml version='1.0'?><TS>", ("XML", "xml", "data")),
    ("a.ipynb", b"", ("Notebook", "json", "document")),
    ("LICENSE", b"", ("Text", "text", "document")),
    ("LICENSE-MIT", b"", ("Text", "text", "document")),
    ("Makefile", b"", ("Makefile", "make", "source")),
    ("Dockerfile", b"", ("Dockerfile", "docker", "source")),
    ("Dockerfile.cuda", b"", ("Dockerfile", "docker", "source")),
    ("CMakeLists.txt", b"", ("CMake", "cmake", "source")),
    ("requirements-dev.txt", b"", ("Text", "text", "data")),
    ("Cargo.lock", b"", ("TOML", "toml", "data")),
    ("a.csv", b"", ("CSV", "text", "data")),
    (".gitignore", b"", ("Text", "text", "other")),
    ("strange.xyzzy", b"", ("Text", "text", "other")),
    ("strange.xyzzy", b"a\0b", ("Binary", "text", "other")),
    ("strange.xyzzy", b"\xff\xfea\0b\0", ("Text", "text", "other")),
    ("a.png", b"", ("Binary", "text", "other")),
    ("a_test.go", b"", ("Go", "go", "test")),
    ("a.test.ts", b"", ("TypeScript", "typescript", "test")),
    ("tests/helper.rs", b"", ("Rust", "rust", "test")),
    ("GemmTest.cpp", b"", ("C++", "cpp", "test")),
    ("contest.cc", b"", ("C++", "cpp", "source")),
    ("testing/tool.py", b"", ("Python", "python", "source")),
    ("app.js.map", b'{"version":3}', ("JSON", "json", "data")),
    ("firmware.map", b"Memory", ("Text", "text", "other")),
    ("tests/data.json", b"", ("JSON", "json", "data")),
]


@pytest.mark.parametrize(("path", "head", "expected"), _FILES)
def test_language_of(path: str, head: bytes, expected: tuple[str, str, str]) -> None:
    assert language_of(path, head) == expected
