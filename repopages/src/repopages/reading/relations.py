"""A module's relations in a checkout: tests, benchmarks, examples and pages that use or mention it."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from repopages.reading.project import Project
from repopages.reading.source import imports_of

_TESTS, _BENCHMARKS, _EXAMPLES, _PAGES = "tests", "benchmarks", "examples", "docs"
_LOOSE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


@dataclass(frozen=True)
class Program:
    """A Python file outside the package.

    Args:
        path: Its path in the checkout.
        uses: How often it refers to each module of the package.
        tests: Number of its test functions.
        summary: First line of its docstring.
    """

    path: str
    uses: dict[str, int]
    tests: int
    summary: str


@dataclass(frozen=True)
class Text:
    """A part of a Markdown page, from one heading to the next.

    Args:
        path: Path of the page in the checkout.
        title: The heading, without markup.
        anchor: The heading's anchor in Markdown links.
        lines: Its lines.
    """

    path: str
    title: str
    anchor: str
    lines: tuple[str, ...]

    @property
    def document(self) -> str:
        """The page in the site, without a suffix."""
        return document_of(self.path)

    @property
    def identifier(self) -> str:
        """The heading's id in HTML, as docutils makes it, or an empty text."""
        return re.sub(r"^[-0-9]+|-+$", "", re.sub(r"[^a-z0-9]+", "-", self.title.lower()))

    @cached_property
    def words(self) -> frozenset[str]:
        """All identifiers in it."""
        return frozenset(re.findall(r"\w+", "\n".join(self.lines)))


class Relations:
    """Files around a package.

    Args:
        project: The package. One that is installed, without a checkout, has none of these files.
    """

    def __init__(self, project: Project) -> None:
        self._project = project

    @cached_property
    def tests(self) -> list[Program]:
        """Test files."""
        return list(self._programs(_TESTS))

    @cached_property
    def benchmarks(self) -> list[Program]:
        """Benchmark programs."""
        return list(self._programs(_BENCHMARKS))

    @cached_property
    def examples(self) -> list[Program]:
        """Example programs."""
        return list(self._programs(_EXAMPLES))

    @cached_property
    def pages(self) -> list[Path]:
        """Markdown pages of the checkout."""
        root = self._project.root
        if root is None:
            return []
        loose = [root / name for name in _LOOSE if (root / name).exists()]
        return [*loose, *sorted((root / _PAGES).rglob("*.md"))]

    @cached_property
    def texts(self) -> list[Text]:
        """All sections of all Markdown pages."""
        root = self._project.root
        return [] if root is None else [text for path in self.pages for text in sections(path, root)]

    def using(self, programs: Iterable[Program], modules: Iterable[str]) -> list[Program]:
        """Return the programs that use any of `modules`, those that use them most first."""
        names = set(modules)

        def uses(program: Program) -> int:
            return sum(count for name, count in program.uses.items() if name in names)

        return sorted(
            (program for program in programs if uses(program)),
            key=lambda program: (-uses(program), program.path),
        )

    def mentioning(self, words: Iterable[str]) -> list[Text]:
        """Return the sections that mention any of `words`, those that mention them most first."""
        sought = set(words)
        found = [text for text in self.texts if text.words & sought and not text.path.startswith("CHANGELOG")]
        pattern = re.compile(r"\b(?:" + "|".join(map(re.escape, sought or {"^"})) + r")\b")
        return sorted(found, key=lambda text: -len(pattern.findall("\n".join(text.lines))))

    def _programs(self, folder: str) -> Iterator[Program]:
        root = self._project.root
        if root is None:
            return
        for path in sorted((root / folder).rglob("*.py")):
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue
            shown = path.relative_to(root).as_posix()
            summary = (ast.get_docstring(tree) or "").partition("\n")[0]
            yield Program(shown, self._uses(tree), _count_tests(tree), summary)

    def _uses(self, tree: ast.Module) -> dict[str, int]:
        """Return how often a file refers to each module: imports, and attributes such as `json.loads`."""
        names = imports_of(tree, "")
        uses: dict[str, int] = {}
        for node in ast.walk(tree):
            dotted = _dotted(node)
            first, _, rest = dotted.partition(".")
            if first in names:
                target = self._project.module_behind(f"{names[first]}.{rest}" if rest else names[first])
                if target and target != self._project.name:
                    uses[target] = uses.get(target, 0) + 1
        for name in names.values():
            target = self._project.module_behind(name)
            if target and target != self._project.name:
                uses.setdefault(target, 1)
        return uses


def document_of(path: str) -> str:
    """Return where the site has a Markdown page of the checkout. Its README is the start page."""
    return "index" if path == "README.md" else path.removesuffix(".md")


def sections(path: Path, root: Path) -> Iterator[Text]:
    """Yield the sections of a Markdown page, without those inside code blocks."""
    title, anchor, held, fenced = path.stem, "", list[str](), False
    shown = path.relative_to(root).as_posix()
    for line in path.read_text(encoding="utf-8").splitlines():
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else re.match(r"#{1,4} (.*)", line)
        if heading:
            yield Text(shown, title, anchor, tuple(held))
            title, held = re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])), []
            anchor = slug(title)
        else:
            held.append(line)
    yield Text(shown, title, anchor, tuple(held))


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _count_tests(tree: ast.Module) -> int:
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in ast.walk(tree))
