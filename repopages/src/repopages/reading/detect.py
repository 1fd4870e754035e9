"""The language and the role of a file, by its name, its first line and its first bytes."""

import re
from functools import lru_cache
from pathlib import PurePosixPath

from pygments.lexers import find_lexer_class_by_name, find_lexer_class_for_filename
from pygments.util import ClassNotFound

_LEXERS = {
    "Python": "python",
    "C": "c",
    "C++": "cpp",
    "CUDA": "cuda",
    "Rust": "rust",
    "Go": "go",
    "JavaScript": "javascript",
    "TypeScript": "typescript",
    "Shell": "bash",
    "Markdown": "markdown",
    "reStructuredText": "rst",
    "TOML": "toml",
    "YAML": "yaml",
    "JSON": "json",
    "Notebook": "json",
    "Text": "text",
    "Binary": "text",
    "Starlark": "python",
    "Dockerfile": "docker",
    "Assembly": "gas",
    "CSV": "text",
    "AsciiDoc": "text",
}
"""Languages that are known by a table here, each with Pygments' name for it."""

_EXTENSIONS = {
    "Python": "py pyi pyw",
    "C": "c",
    "C++": "cc cpp cxx c++ hh hpp hxx h++ ipp inl tpp txx ixx cppm",
    "CUDA": "cu cuh",
    "Rust": "rs",
    "Go": "go",
    "JavaScript": "js mjs cjs jsx es6",
    "TypeScript": "ts mts cts tsx",
    "Shell": "sh bash zsh ksh bats",
    "Markdown": "md markdown mdown mkd mdx",
    "reStructuredText": "rst rest",
    "TOML": "toml",
    "YAML": "yaml yml",
    "JSON": "json jsonc json5 jsonl geojson webmanifest avsc",
    "Notebook": "ipynb",
    "Text": "txt text log",
    "Starlark": "bzl star",
    "Assembly": "s asm",
    "CSV": "csv tsv",
    "AsciiDoc": "adoc asciidoc",
    "Binary": "avi bmp bz2 dll docx dylib eot exe gif gz ico jar jpeg jpg mo mov mp3 mp4 npy npz ogg onnx otf"
    " parquet pdf pickle pkl png pt pth pyc pyd pyo safetensors so sqlite tar tgz tif tiff ttf wasm wav webm"
    " webp whl woff woff2 xlsx xz zip zst",
}
_BY_EXTENSION = {extension: language for language, many in _EXTENSIONS.items() for extension in many.split()}

_NAMES = {
    "Shell": ".bashrc .bash_profile .profile .zshrc .envrc pkgbuild gradlew",
    "TOML": "cargo.lock poetry.lock uv.lock pdm.lock pipfile",
    "YAML": ".clang-format .clang-tidy .clangd citation.cff .yamllint .prettierrc.yml pnpm-lock.yaml",
    "JSON": ".babelrc .eslintrc .jshintrc .prettierrc .swcrc composer.lock flake.lock pipfile.lock",
    "Python": "sconstruct sconscript wscript",
    "Starlark": "build build.bazel workspace workspace.bazel buck module.bazel",
    "Text": "authors changelog changes codeowners contributing contributors copying copyright history install"
    " licence license maintainers news notice notes patents readme thanks todo unlicense version",
}
_BY_NAME = {name: language for language, many in _NAMES.items() for name in many.split()}

_UNKNOWN = "Unknown"
_MISLEADING = {"POVRay"}
"""What Pygments says of .inc, which is a fragment of C, PHP or a makefile more often."""

_DOCUMENTS = {"Markdown", "reStructuredText", "Notebook", "Text", "AsciiDoc", "TeX", "Org Mode", "Groff"}
_DATA = {"TOML", "YAML", "JSON", "INI", "XML", "CSV", "Properties", "EditorConfig", "Diff", "DTD"}
_DATA_TEXT = re.compile(r"(requirements|constraints|robots|sources|top_level|entry_points).*\.txt$")
"""Files named .txt that programs read."""

_CPP = re.compile(
    rb"^\s*(?:class\s+\w|namespace\b|template\s*<|using\s|public:|private:)|\bconstexpr\b|\bstd::"
    rb"|#\s*include\s*<[a-z_]+>",
    re.MULTILINE,
)
"""Shows that a header named .h is C++: its keywords, or headers of its library, which have no extension."""

_TEST_FOLDERS = {"test", "tests", "__tests__", "spec", "specs", "testdata"}
_TEST_NAME = re.compile(
    r"(?:^test_.*|.*_tests?|^tests?|^conftest|.*[.-](?:test|spec)s?|.*_spec|.*[a-z0-9]Tests?|^Test[A-Z].*)$"
)


def language_of(path: str, head: bytes) -> tuple[str, str, str]:
    """Return the language, the lexer and the role of a file.

    Args:
        path: Its path from the root of the repository, with "/".
        head: Its first bytes, a few thousand. They decide for scripts without an extension, for headers named
            .h and for binary files.

    Returns:
        The language as in `Facts.language`, or Pygments' name of a language that has no reader; Pygments'
        short name of it; and the role: "source", "test", "document", "data" or "other".
    """
    language, lexer = _language(PurePosixPath(path), head)
    if language == _UNKNOWN:
        return "Text", "text", "other"
    return language, lexer, _role(PurePosixPath(path), language)


def _language(path: PurePosixPath, head: bytes) -> tuple[str, str]:
    extension = path.suffix[1:].lower()
    language = _BY_NAME.get(path.name.lower()) or _BY_EXTENSION.get(extension)
    if language is None and extension == "h":
        language = "C++" if _CPP.search(head) else "C"
    if language in ("TypeScript", "Text") and head.lstrip().startswith(b"<?xml"):
        return "XML", "xml"  # Qt's translations are named .ts as well.
    if language == "TypeScript" and extension == "tsx":
        return language, "tsx"
    if extension == "map" and head.startswith(b"{"):
        return "JSON", "json"  # from the source of a script to the script; a linker's map is text
    if path.name.lower() == "cmakelists.txt":
        return "CMake", "cmake"
    if language is None and _is_binary(head):
        language = "Binary"
    if language is not None:
        return language, _LEXERS[language]
    return _by_first_line(head) or _by_pygments(path.name)


def _is_binary(head: bytes) -> bool:
    """Return whether bytes are no text: zeros, unless a mark says that it is UTF-16 or UTF-32."""
    return b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))


_INTERPRETERS = dict.fromkeys(("sh", "bash", "zsh", "dash", "ksh", "ash", "bats"), "Shell") | {
    "python": "Python",
    "pypy": "Python",
    "node": "JavaScript",
    "nodejs": "JavaScript",
    "deno": "TypeScript",
    "bun": "TypeScript",
    "ts-node": "TypeScript",
    "tsx": "TypeScript",
}
_SHEBANG = re.compile(r"#!\s*(?:\S*/env\s+(?:-\S+\s+|\w+=\S*\s+)*)?(?:\S*/)?([A-Za-z_+-]+)")


def _by_first_line(head: bytes) -> tuple[str, str] | None:
    """Return the language of a script by the interpreter that its first line names."""
    found = _SHEBANG.match(head.split(b"\n", 1)[0].decode("latin-1"))
    if not found:
        return None
    interpreter = found.group(1)
    language = _INTERPRETERS.get(interpreter)
    if language:
        return language, _LEXERS[language]
    try:
        lexer = find_lexer_class_by_name(interpreter)
    except ClassNotFound:
        return None
    return lexer.name, lexer.aliases[0]


@lru_cache(maxsize=4096)
def _by_pygments(name: str) -> tuple[str, str]:
    """Return the language that Pygments finds for a name: Makefile, Dockerfile, CMake and hundreds more."""
    lexer = find_lexer_class_for_filename(name)
    if lexer is None and name.lower().startswith(("dockerfile", "containerfile")):
        return "Dockerfile", "docker"
    if lexer is None and name.upper().startswith(
        ("LICENSE", "LICENCE", "COPYING", "README", "NOTICE", "CHANGELOG")
    ):
        return "Text", "text"
    if lexer is None or not lexer.aliases or lexer.name in _MISLEADING:
        return _UNKNOWN, "text"
    return {"Docker": "Dockerfile", "Text only": "Text"}.get(lexer.name, lexer.name), lexer.aliases[0]


def _role(path: PurePosixPath, language: str) -> str:
    if language == "Binary":
        return "other"
    if language in _DATA or _DATA_TEXT.match(path.name):
        return "data"
    if language in _DOCUMENTS:
        return "document"
    if _TEST_FOLDERS.intersection(path.parts[:-1]) or _TEST_NAME.match(path.name.partition(".")[0]):
        return "test"
    return "test" if _TEST_NAME.match(path.stem) else "source"
