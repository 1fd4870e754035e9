"""The command `repopages`. Data goes to stdout, everything else to stderr.

Exit codes: 0 done · 1 failed · 2 wrong usage · 3 not possible on this machine.
"""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from repopages import __version__
from repopages.errors import OptionError, RepopagesError
from repopages.pages.dialect import GitHub
from repopages.pages.keywords import look_up
from repopages.pages.write import write_pages
from repopages.relations.library import Library, open_library
from repopages.site.build import Built
from repopages.site.build import build as build_site

_MOST = 20  # entries that fit a screen
_ROLE = re.compile(r":[\w:]+:`~?")
"""The head of a reST role, such as `:class:`, which says nothing in a terminal."""


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. A full disk or a missing permission is one line, as an error of repopages is."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends quietly if the reader of a pipe has gone
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise RepopagesError(f"{where}{error.strerror or error}") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="repopages")
def main() -> None:
    """Document every file of a repository. Files are parsed, and nothing of them is imported or run.

    PATH is a checkout, a folder, a file, or the name of an installed Python package.
    """


_include = click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="Only these files. A pattern as in .gitignore, repeatable.",
)
_exclude = click.option(
    "--exclude",
    multiple=True,
    metavar="GLOB",
    help="Not these files. A pattern as in .gitignore, repeatable.",
)
_jobs = click.option("--jobs", type=click.IntRange(min=1), help="Processes. By default one for each core.")


@main.command()
@click.argument("path")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the result.  [default: site]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["site", "markdown"]),
    default="site",
    show_default=True,
    help="A site, or Markdown files in the tree of the repository.",
)
@_include
@_exclude
@_jobs
@click.option("--strict", is_flag=True, help="Exit with code 1 after a warning or a link that leads nowhere.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(
    path: str,
    out: Path | None,
    form: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    jobs: int | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Write a page and a keyword index for every file, and an index and a page for every folder.

    Unchanged files are not read or written again.

    Try:

    \b
      repopages build . --out site
      repopages build torch.distributed.algorithms --format markdown --out pages
    """  # noqa: D301 - click needs the control character \b, not a raw string
    folder = out or Path("pages" if form == "markdown" else "site")
    progress = _Progress()
    library = _open(path, folder, include, exclude, jobs, progress)
    if form == "markdown":
        _build_markdown(library, folder, strict, as_json, progress)
        return
    built = build_site(library, folder, jobs=jobs, progress=progress)
    progress.end()
    _report(built, path, strict, as_json)


def _open(
    path: str,
    out: Path | None,
    include: Sequence[str],
    exclude: Sequence[str],
    jobs: int | None,
    progress: "_Progress",
) -> Library:
    """Read a repository, without the result that an earlier build wrote into it."""
    unwanted = list(exclude)
    if out is not None:
        root = Path(path).expanduser().resolve()
        if root.is_dir() and out.resolve().is_relative_to(root):
            written = out.resolve().relative_to(root).as_posix()
            if written == ".":
                raise OptionError(f"out={str(out)!r} is the repository itself: pass another folder")
            unwanted.append("/" + written.translate({ord(sign): f"\\{sign}" for sign in "*?[]!# \\"}))
    library = open_library(path, include=include, exclude=unwanted, jobs=jobs, progress=progress)
    if not library.files:
        raise OptionError(
            f"path={path!r} has no files to document: .gitignore, --include and --exclude apply"
        )
    return library


def _report(built: Built, path: str, strict: bool, as_json: bool) -> None:
    for line in (*built.warnings, *(built.missing if strict else ())):
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps({**asdict(built), "folder": str(built.folder)}, indent=2))
    else:
        click.echo(
            f"{built.pages:,} pages, {built.written:,} of them new, {built.keywords:,} keywords", err=True
        )
        if built.missing and not strict:
            click.echo(
                f"Links of its documents that lead nowhere: {len(built.missing)}, which --strict lists",
                err=True,
            )
        click.echo((built.folder / "index.html").resolve())
    found = len(built.warnings) + len(built.missing)
    if strict and found:
        raise RepopagesError(f"the site of {path} has {found} warnings, shown above")


def _build_markdown(
    library: Library, folder: Path, strict: bool, as_json: bool, progress: "_Progress"
) -> None:
    inside = folder.resolve().is_relative_to(library.root)
    written = write_pages(
        library, GitHub(root=os.path.relpath(library.root, folder) if inside else ""), folder, progress
    )
    progress.end()
    for line in library.warnings:
        click.echo(line, err=True)
    if as_json:
        result = {**asdict(written), "folder": str(folder), "warnings": list(library.warnings)}
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo((folder / "index.md").resolve())
    if strict and library.warnings:
        raise RepopagesError(f"the pages have {len(library.warnings)} warnings, shown above")


@main.command()
@click.argument("keyword")
@click.argument("path", default=".")
@click.option("--json", "as_json", is_flag=True, help="Print all entries as JSON.")
def find(keyword: str, path: str, as_json: bool) -> None:
    """Look a name or a concept up, without building anything.

    Try:

    \b
      repopages find residual
      repopages find JSONDecoder json
    """  # noqa: D301
    progress = _Progress()
    library = _open(path, None, (), (), None, progress)
    found = look_up(keyword, library)
    progress.end()
    if as_json:
        click.echo(json.dumps([entry._asdict() for entry in found], indent=2))
        return
    if not found:
        raise OptionError(f"keyword={keyword!r} is not in the index of {path}: try a part of it")
    for entry in found[:_MOST]:
        click.secho(entry.word, bold=True, nl=False)
        click.echo(f"  {entry.kind}  {entry.path}#{entry.anchor}")
        if entry.summary:
            click.echo(f"    {_ROLE.sub('`', entry.summary)}")
    if len(found) > _MOST:
        click.echo(f"and {len(found) - _MOST} more", err=True)


@main.command()
@click.argument("path", default=".")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 for any free one."
)
@_include
@_exclude
@_jobs
def serve(path: str, port: int, include: tuple[str, ...], exclude: tuple[str, ...], jobs: int | None) -> None:
    """Build a site, show it at http://127.0.0.1, and build it again when files change. Ctrl-C ends it.

    Try:

    \b
      repopages serve
      repopages serve json --port 8080
    """  # noqa: D301
    from repopages.site.serve import serve as serve_site

    def rebuilt(out: Path) -> None:
        progress = _Progress()
        built = build_site(
            _open(path, None, include, exclude, jobs, progress), out, jobs=jobs, progress=progress
        )
        progress.end()
        for line in built.warnings:
            click.echo(line, err=True)
        click.echo(f"{built.pages:,} pages, {built.written:,} of them new", err=True)

    serve_site(
        path, port, rebuilt, include=include, exclude=exclude, say=lambda line: click.echo(line, err=True)
    )


class _Progress:
    """The state of long work as one line of a terminal, or one line for each phase elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._phase, self._shown = "", 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._terminal and (phase != self._phase or now - self._shown > 0.1):
            click.echo(f"\r\033[K{phase} {done:,}/{total:,}", err=True, nl=False)
            self._shown = now
        elif phase != self._phase and total > 200:  # a log needs no line about work of a second
            click.echo(f"{phase} …", err=True)
        self._phase = phase

    def end(self) -> None:
        """Clear the line."""
        if self._terminal:
            click.echo("\r\033[K", err=True, nl=False)
