"""What the imports of every language but Python lead to: files of the repository, or packages outside it."""

import json
import posixpath
import re
from collections.abc import Mapping
from functools import cached_property
from urllib.parse import unquote

from repopages.reading.model import Facts, Import
from repopages.relations.python import LONGEST

_SCRIPTS = (".ts", ".tsx", ".d.ts", ".mts", ".cts", ".js", ".jsx", ".mjs", ".cjs", ".json", ".vue", ".svelte")
_NODE = (
    "assert async_hooks buffer child_process cluster console constants crypto dgram dns domain events fs http"
    " http2 https inspector module net os path perf_hooks process punycode querystring readline repl stream"
    " string_decoder sys timers tls tty url util v8 vm wasi worker_threads zlib"
)
_C = (
    "assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdalign stdarg"
    " stdatomic stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time uchar wchar wctype"
)
_LONGEST_SUFFIX = 6
_LONGEST_JSON = 1 << 15
_MANY = 64
"""Files of the same name that are compared for the nearest one."""


class Imports:
    """Resolution of imports to files.

    Args:
        files: Facts of all files, by path.
        folders: Paths of all folders.
    """

    def __init__(self, files: Mapping[str, Facts], folders: Mapping[str, object]) -> None:
        self._files = files
        self._folders = folders

    def targets(self, entry: Import, facts: Facts) -> list[str]:
        """Return the files of the repository that an import leads to, none if it leads outside."""
        found = {
            "C": self._include,
            "C++": self._include,
            "CUDA": self._include,
            "JavaScript": self._script,
            "TypeScript": self._script,
            "Rust": self._rust,
            "Go": self._go,
            "Shell": self._shell,
        }
        resolve = found.get(facts.language) if len(entry.module) <= LONGEST else None
        return [path for path in resolve(entry, facts) if path != facts.path] if resolve else []

    def outside(self, entry: Import, language: str) -> tuple[str, bool] | None:
        """Return the package that an import leads to, and whether it is of the standard library.

        Returns:
            None if that cannot be known, as for a relative path that leads nowhere.
        """
        module = entry.module
        if language in ("C", "C++", "CUDA"):
            name = module.strip("<>")
            standard = "/" not in name and ("." not in name or name.removesuffix(".h") in _C.split())
            return name, standard
        if language in ("JavaScript", "TypeScript") and not module.startswith((".", "/", "#")):
            parts = module.removeprefix("node:").split("/")
            name = "/".join(parts[:2] if module.startswith("@") else parts[:1])
            return name, module.startswith("node:") or name in _NODE.split()
        if language == "Rust" and module.partition("::")[0] not in ("crate", "self", "super", ""):
            name = module.partition("::")[0]
            return name, name in ("std", "core", "alloc", "proc_macro", "test")
        if language == "Go" and module and not module.startswith("."):
            return module, "." not in module.partition("/")[0]
        return (module, False) if language == "Text" else None  # requirements.txt

    def link(self, target: str, facts: Facts) -> str | None:
        """Return the file or folder that a document's link leads to, or None if it leads outside."""
        if re.match(r"[A-Za-z][\w+.-]*:|//|#", target):
            return None
        address = unquote(re.split(r"[#?]", target, maxsplit=1)[0])
        base = "" if address.startswith("/") else facts.folder
        path = _joined(base, address.lstrip("/"))
        if path is None or not address:
            return None
        if path in self._files or (path and path in self._folders):
            return path
        tried = (f"{path}.md", f"{path}.rst", f"{path}/README.md", f"{path}/index.md")
        return next((path for path in tried if path in self._files), None)

    # C and C++ ------------------------------------------------------------------------------------

    def _include(self, entry: Import, facts: Facts) -> list[str]:
        name = entry.module.strip('<>"')
        # Quoted ones are relative to the file first, as the compiler has it.
        path = _joined(facts.folder, name)
        if not entry.module.startswith("<") and path in self._files:
            return [str(path)]
        if name.removesuffix(".h") in _C.split() or "." not in name:
            return []
        return self._nearest(posixpath.normpath(name), facts)

    def _nearest(self, suffix: str, facts: Facts) -> list[str]:
        """Return the file whose path ends with `suffix`, of several the one in the nearest folder."""
        clean = re.sub(r"^(?:\.\./)+", "", suffix)
        parts = clean.split("/")
        found = self._by_suffix.get("/".join(parts[-_LONGEST_SUFFIX:]), ())[:_MANY]
        found = [path for path in found if path == clean or path.endswith(f"/{clean}")]
        if not found:
            return []
        return [max(found, key=lambda path: (len(posixpath.commonpath([path, facts.path])), -len(path)))]

    @cached_property
    def _by_suffix(self) -> dict[str, list[str]]:
        """Files by the last parts of their paths."""
        found: dict[str, list[str]] = {}
        for path, facts in self._files.items():
            if facts.language in ("C", "C++", "CUDA", "Shell"):
                parts = path.split("/")[-_LONGEST_SUFFIX:]
                for start in range(len(parts)):
                    found.setdefault("/".join(parts[start:]), []).append(path)
        return found

    # JavaScript and TypeScript --------------------------------------------------------------------

    def _script(self, entry: Import, facts: Facts) -> list[str]:
        module = entry.module
        if module.startswith("."):
            return self._script_at(_joined(facts.folder, module))
        parts = module.split("/")
        for count in (2, 1) if module.startswith("@") else (1,):
            name, rest = "/".join(parts[:count]), "/".join(parts[count:])
            if name in self._packages:
                folder, main = self._packages[name]
                if rest:
                    return self._script_at(_joined(folder, rest)) or self._script_at(
                        _joined(folder, f"src/{rest}")
                    )
                tried = (main, "src/index", "index", "lib/index")
                found = (self._script_at(_joined(folder, way)) for way in tried if way)
                return next((paths for paths in found if paths), [])
        for pattern, bases in self._aliases(facts.folder):
            head, star, tail = pattern.partition("*")
            if module == pattern or (star and module.startswith(head) and module.endswith(tail)):
                middle = module[len(head) : len(module) - len(tail)]
                for base in bases:
                    found_at = self._script_at(_joined("", base.replace("*", middle)))
                    if found_at:
                        return found_at
        return []

    def _script_at(self, path: str | None) -> list[str]:
        if path is None:
            return []
        # TypeScript writes the name of the file that it will become: "./view.js" for view.ts.
        stem = re.sub(r"\.([cm]?)jsx?$", "", path)
        tried = [path, *(path + end for end in _SCRIPTS), *(f"{path}/index{end}" for end in _SCRIPTS)]
        tried += [stem + end for end in _SCRIPTS] if stem != path else []
        return next(([way] for way in tried if way in self._files), [])

    @cached_property
    def _packages(self) -> dict[str, tuple[str, str]]:
        """Folder and main file of every npm package of the repository, by name."""
        found = {}
        for facts in self._files.values():
            data = _json(facts.text) if facts.name == "package.json" else None
            if isinstance(data, dict) and isinstance(data.get("name"), str):
                mains = (data.get(key) for key in ("source", "module", "main", "types"))
                found[data["name"]] = (
                    facts.folder,
                    next((main for main in mains if isinstance(main, str)), ""),
                )
        return found

    def _aliases(self, folder: str) -> list[tuple[str, list[str]]]:
        """Return the `paths` of the nearest tsconfig.json at or above a folder, relative to the root."""
        while True:
            if folder in self._configs:
                return self._configs[folder]
            if not folder:
                return []
            folder = folder.rpartition("/")[0]

    @cached_property
    def _configs(self) -> dict[str, list[tuple[str, list[str]]]]:
        found = {}
        for facts in self._files.values():
            data = _json(facts.text) if facts.name in ("tsconfig.json", "jsconfig.json") else None
            options = data.get("compilerOptions") if isinstance(data, dict) else None
            paths = options.get("paths") if isinstance(options, dict) else None
            if isinstance(options, dict) and isinstance(paths, dict):
                base = str(options.get("baseUrl", "."))
                found[facts.folder] = [
                    (pattern, [posixpath.join(facts.folder, base, str(way)) for way in ways])
                    for pattern, ways in paths.items()
                    if isinstance(ways, list)
                ]
        return found

    # Rust -----------------------------------------------------------------------------------------

    def _rust(self, entry: Import, facts: Facts) -> list[str]:
        first, *parts = [
            *entry.module.split("::"),
            *([entry.name] if entry.name not in ("", "*", "self") else []),
        ]
        if first == "crate":
            folder = self._crate(facts.folder)
        elif first in ("self", "super"):
            folder = _rust_folder(facts)
            while first == "super":
                folder = folder.rpartition("/")[0]
                first, *parts = parts or [""]
            if first not in ("self", ""):
                parts.insert(0, first)
        elif first in self._crates:
            folder = self._crates[first]
        else:
            # Perhaps a module that the file declares.
            return self._rust_file(_rust_folder(facts), [first, *parts])
        return (
            self._rust_file(folder, parts)
            or [
                path
                for name in ("lib.rs", "main.rs", "mod.rs")
                if (path := _join(folder, name)) in self._files
            ][:1]
        )

    def _rust_file(self, folder: str, parts: list[str]) -> list[str]:
        """Return the file of the longest module in a path; the rest of the path are names in it."""
        for count in range(len(parts), 0, -1):
            stem = _join(folder, "/".join(parts[:count]))
            for path in (f"{stem}.rs", f"{stem}/mod.rs"):
                if path in self._files:
                    return [path]
        return []

    def _crate(self, folder: str) -> str:
        """Return the folder of the sources of the crate around a folder."""
        while True:
            if _join(folder, "Cargo.toml") in self._files:
                return _join(folder, "src")
            if not folder:
                return "src"
            folder = folder.rpartition("/")[0]

    @cached_property
    def _crates(self) -> dict[str, str]:
        """Folder of the sources of every crate of the repository, by the name that programs use."""
        found = {}
        for facts in self._files.values():
            name = (
                re.search(r'^name\s*=\s*"([^"]+)"', facts.text, re.M) if facts.name == "Cargo.toml" else None
            )
            if name:
                found[name[1].replace("-", "_")] = _join(facts.folder, "src")
        return found

    # Go -------------------------------------------------------------------------------------------

    def _go(self, entry: Import, facts: Facts) -> list[str]:
        """Return the files of a package that define names which the importer uses, or else its first file."""
        folder = self._go_folder(entry.module, facts)
        files = self._go_files.get(folder, ()) if folder is not None else ()
        local = entry.alias or entry.module.rpartition("/")[2]
        starts = (f"{local}.", f"{entry.module}.")
        used = {
            name[len(start) :].partition(".")[0]
            for name in facts.names
            for start in starts
            if name.startswith(start)
        }
        chosen = [path for path in files if any(item.name in used for item in self._files[path].items)]
        return chosen or list(files[:1])

    def _go_folder(self, module: str, facts: Facts) -> str | None:
        if module.startswith("."):
            return _joined(facts.folder, module)
        parts = module.split("/")
        for count in range(len(parts), 0, -1):
            base = self._go_modules.get("/".join(parts[:count]))
            if base is not None:
                return _join(base, "/".join(parts[count:]))
        return None

    @cached_property
    def _go_modules(self) -> dict[str, str]:
        """Folder of every module of the repository, by the path that its go.mod declares."""
        found = {}
        for facts in self._files.values():
            name = (
                re.search(r'^module\s+"?([^\s"]+)', facts.text, re.MULTILINE)
                if facts.name == "go.mod"
                else None
            )
            if name:
                found[name[1]] = facts.folder
        return found

    @cached_property
    def _go_files(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path, facts in sorted(self._files.items()):
            if facts.language == "Go" and not path.endswith("_test.go"):
                found.setdefault(facts.folder, []).append(path)
        return found

    # Shell ----------------------------------------------------------------------------------------

    def _shell(self, entry: Import, facts: Facts) -> list[str]:
        # Variables at its start are mostly the folder of the script: only what follows them is known.
        name = re.sub(r"^.*[$`)}][\w{}]*/", "", entry.module.strip("\"'"))
        for base in (facts.folder, ""):
            path = _joined(base, name)
            if path in self._files:
                return [str(path)]
        return self._nearest(posixpath.normpath(name), facts) if name and "$" not in name else []


def _rust_folder(facts: Facts) -> str:
    """Return the folder in which the modules inside a Rust file lie."""
    if facts.name in ("mod.rs", "lib.rs", "main.rs"):
        return facts.folder
    return _join(facts.folder, facts.name.removesuffix(".rs"))


def _join(folder: str, name: str) -> str:
    return "/".join(part for part in (folder, name) if part)


def _joined(folder: str, way: str) -> str | None:
    """Return a path relative to a folder as one from the root, or None if it leads out of the repository."""
    path = posixpath.normpath(posixpath.join(folder, way))
    return None if path.startswith(("../", "/")) or path == ".." else "" if path == "." else path


def _json(text: str) -> object:
    """Return the value of a JSON file that may have comments and trailing commas, or None if it is broken."""
    try:
        # The search for comments is quadratic in a hostile file.
        return json.loads(_plain_json(text) if len(text) < _LONGEST_JSON else text)
    except (ValueError, RecursionError):
        return None


def _plain_json(text: str) -> str:
    def keep(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else ""

    return re.sub(
        r",(\s*[}\]])", r"\1", re.sub(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', keep, text, flags=re.S)
    )
