"""Tests, examples and documents of a file: which of them import it, name it or link to it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from repopages.reading.model import Facts, Item, Section
from repopages.relations.graph import Edge, Use
from repopages.relations.python import Modules

_EXAMPLES = {
    "demo",
    "demos",
    "example",
    "examples",
    "notebooks",
    "sample",
    "samples",
    "tutorial",
    "tutorials",
}
_HISTORY = re.compile(r"(?:change|changes|changelog|history|news|release|releases|whatsnew)\b", re.IGNORECASE)
_TEST_MARKS = re.compile(r"^tests?[_-]|[_.-](?:tests?|specs?)(?=$|\.)|(?<=[a-z0-9])Tests?$|^Test(?=[A-Z])")
_DISTINCT = re.compile(r"\w*(?:[^\W_]_+[^\W_]|\d|[a-z][A-Z]|[A-Z]{2}[a-z])\w*$")
"""Names that are no English words: with an underscore, a digit or a capital inside."""

_FAMILIES = {"C++": "C", "CUDA": "C", "TypeScript": "JavaScript"}
_MOST_DOCUMENTS = 20
_MOST_BEHIND = 10

NAMED, _IMPORTS, _NAMES, _BEHIND = (
    "is named after it",
    "imports it",
    "names it",
    "imports a file that imports it",
)


class Uses:
    """Tests, examples and documents.

    Args:
        files: Facts of all files, by path.
        modules: Those of Python.
        imports: Imports of each file that lead to files of the repository.
        links: Links of each document that lead to files of the repository.
        public: Names and definitions that each file defines for its users.
    """

    def __init__(
        self,
        files: Mapping[str, Facts],
        modules: Modules,
        imports: Mapping[str, list[Edge]],
        links: Mapping[str, list[Edge]],
        public: Mapping[str, list[tuple[str, str, Item]]],
    ) -> None:
        self._files = files
        self._modules = modules
        self._imports = imports
        self._links = links
        self._public = public

    # Tests and examples ---------------------------------------------------------------------------

    @cached_property
    def tests(self) -> dict[str, list[Use]]:
        """Test files that use each file."""
        programs = [facts for facts in self._files.values() if facts.role == "test" and _has_tests(facts)]
        return self._by_target(programs)

    @cached_property
    def examples(self) -> dict[str, list[Use]]:
        """Example programs that use each file."""
        programs = [
            facts
            for facts in self._files.values()
            if facts.role in ("source", "document")
            and (_EXAMPLES.intersection(facts.folder.lower().split("/")) or facts.language == "Notebook")
        ]
        return self._by_target(programs)

    def behind(self, importers: Iterable[Edge]) -> list[Use]:
        """Return tests of the files that import a file: better evidence than none."""
        found: dict[str, Use] = {}
        for edge in importers:
            for use in self.tests.get(edge.source, ()):
                found.setdefault(use.path, Use(path=use.path, line=use.line, how=_BEHIND, count=1))
                if len(found) == _MOST_BEHIND:
                    return list(found.values())
        return list(found.values())

    def _by_target(self, programs: Iterable[Facts]) -> dict[str, list[Use]]:
        found: dict[str, list[Use]] = {}
        for program in programs:
            for target, use in self._used(program).items():
                if target != program.path:
                    found.setdefault(target, []).append(use)
        for uses in found.values():
            uses.sort(key=lambda use: (use.how != NAMED, -use.count, use.path))
        return found

    def _used(self, program: Facts) -> dict[str, Use]:
        """Return how a program uses each file of the repository."""
        lines = {edge.target: edge.line for edge in self._imports.get(program.path, ())}
        names: dict[str, set[str]] = {target: set() for target in lines}
        if program.language == "Python":
            for path, name in self._python_names(program):
                names.setdefault(path, set()).add(name)
        else:
            for word in program.names:
                definer = self._defining(word.rpartition(".")[2], program)
                if definer is not None:
                    names.setdefault(definer, set()).add(word)
        subject = self._subject(program)
        if subject is not None:
            names.setdefault(subject, set())
        return {
            target: Use(
                path=program.path,
                line=lines.get(target, 1),
                how=NAMED if target == subject else _IMPORTS if target in lines else _NAMES,
                count=max(1, len(used - {""})),
            )
            for target, used in names.items()
        }

    def _python_names(self, program: Facts) -> Iterator[tuple[str, str]]:
        """Yield the definitions that a Python program uses through its imports."""
        imported = {entry.module.partition(".")[0] for entry in program.imports if not entry.level}
        for name in program.names:
            if name.startswith(".") or ("." in name and name.partition(".")[0] in imported):
                found = self._modules.dotted(name, program.path)
                if found is not None and found.item is not None:
                    yield found.path, found.name

    def _defining(self, word: str, program: Facts) -> str | None:
        """Return the only file that defines a name in the program's language, those of its folder first."""
        known = self._definers.get((_family(program), word), ())
        near = [path for path in known if self._files[path].folder == program.folder]
        if len(near) == 1:
            return near[0]
        return known[0] if len(known) == 1 and len(word) > 3 else None

    @cached_property
    def _definers(self) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = {}
        for path, entries in self._public.items():
            family = _family(self._files[path])
            for word in {name.rpartition(".")[2] for _, name, _ in entries}:
                found.setdefault((family, word), []).append(path)
        return found

    def _subject(self, program: Facts) -> str | None:
        """Return the file that a test is named after: test_cart.py, cart_test.go, cart.spec.ts for cart."""
        stem = program.name.rpartition(".")[0]
        plain = _TEST_MARKS.sub("", stem)
        candidates = (
            self._by_stem.get((_family(program), plain.lower()), ()) if plain not in ("", stem) else ()
        )
        if not candidates or len(candidates) > 32:
            return None
        around = set(program.folder.split("/"))
        return max(candidates, key=lambda path: (len(around.intersection(path.split("/"))), -len(path), path))

    @cached_property
    def _by_stem(self) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = {}
        for path, facts in self._files.items():
            if facts.role == "source":
                stem = facts.name.partition(".")[0].lower()
                found.setdefault((_family(facts), stem), []).append(path)
                if stem.startswith("_"):
                    found.setdefault((_family(facts), stem.lstrip("_")), []).append(path)
        return found

    # Documents ------------------------------------------------------------------------------------

    @cached_property
    def documents(self) -> dict[str, list[tuple[str, Section]]]:
        """Sections that link to each file or mention its names, the closest first."""
        scores: dict[str, dict[tuple[str, int], float]] = {}
        for path, facts in self._files.items():
            for edge in self._links.get(path, ()):
                position = _section_at(facts, edge.line)
                if position is not None:
                    held = scores.setdefault(edge.target, {})
                    held[path, position] = held.get((path, position), 0.0) + 10.0
        for word, places in self._mentions.items():
            for place in places:
                held = scores.setdefault(self._words[word], {})
                # A word of every page says less of a file than one of a single section.
                held[place] = held.get(place, 0.0) + 1 / len(places)
        return {
            path: [
                (document, self._files[document].sections[position])
                for _, document, position in sorted((-score, *place) for place, score in held.items())
                if document != path
            ][:_MOST_DOCUMENTS]
            for path, held in scores.items()
        }

    @cached_property
    def _mentions(self) -> dict[str, list[tuple[str, int]]]:
        """The sections that mention each distinctive word, by document and position."""
        found: dict[str, list[tuple[str, int]]] = {}
        for path, facts in self._files.items():
            if facts.role != "document" or _HISTORY.match(facts.name):
                continue
            for place, section in enumerate(facts.sections):
                code = {part for term in section.terms if term.kind == "code" for part in _parts(term.word)}
                for word in (section.words | code) & self._words.keys():
                    if word in code or _DISTINCT.match(word):
                        found.setdefault(word, []).append((path, place))
        return found

    @cached_property
    def _words(self) -> dict[str, str]:
        """The file of every name that only one file defines, and of every name that only one file has."""
        found: dict[str, str | None] = {}
        for path, facts in self._files.items():
            if facts.role == "source":
                words = {name.rpartition(".")[2] for _, name, _ in self._public.get(path, ())}
                for word in words | {facts.name.partition(".")[0]}:
                    known = found.setdefault(word, path)
                    # A header and its implementation define the same names: the header explains them.
                    if known is not None and known != path:
                        same = known.rpartition(".")[0] == path.rpartition(".")[0]
                        found[word] = max(known, path, key=lambda name: name.endswith("h")) if same else None
        return {word: path for word, path in found.items() if path is not None and len(word) > 3}


def _has_tests(facts: Facts) -> bool:
    """Return whether a file in a folder of tests is a test, not a helper of tests."""
    return facts.tests > 0 if facts.language == "Python" else True


def _family(facts: Facts) -> str:
    """Return the language, the same for those whose files use each other."""
    return _FAMILIES.get(facts.language, facts.language)


def _parts(word: str) -> list[str]:
    """Return the identifiers in a code span such as `cart.total()`."""
    return re.findall(r"\w+", word) if len(word) < 80 else []


def _section_at(facts: Facts, line: int) -> int | None:
    """Return the position of the section that a line of a document is in."""
    place = None
    for position, section in enumerate(facts.sections):
        if section.line > line and place is not None:
            break
        place = position
    return place
