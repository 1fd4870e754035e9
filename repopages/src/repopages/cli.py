"""The command `repopages`. Data goes to stdout, everything else to stderr.

Exit codes: 0 done · 1 failed · 2 wrong usage · 3 not possible on this machine.
"""

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from repopages import __version__
from repopages.errors import OptionError, RepopagesError
from repopages.pages.keywords import look_up
from repopages.site.build import build as build_site

_MOST = 20  # entries that fit a screen


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
    """Document any Python package from its sources, which are parsed and never imported.

    PATH is a checkout, the folder of a package, or the name of an installed package.
    """


@main.command()
@click.argument("path")
@click.option(
    "--out", default="site", show_default=True, type=click.Path(path_type=Path), help="Folder of the site."
)
@click.option("--strict", is_flag=True, help="Exit with code 1 if Sphinx warns or a link is broken.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def build(path: str, out: Path, strict: bool, as_json: bool) -> None:
    """Build a site that works offline, with a page and a keyword index for each module.

    Try:

    \b
      repopages build . --out site/
      repopages build json
    """  # noqa: D301 - click needs the control character \b, not a raw string
    result = build_site(path, out)
    for line in result.warnings:
        click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps({**asdict(result), "folder": str(out)}, indent=2))
    else:
        click.echo(f"{result.pages} pages of modules, {result.keywords} keywords", err=True)
        click.echo((out / "index.html").resolve())
    if strict and result.warnings:
        raise RepopagesError(f"the site of {path} has {len(result.warnings)} warnings, shown above")


@main.command()
@click.argument("keyword")
@click.argument("path", default=".")
@click.option("--json", "as_json", is_flag=True, help="Print all entries as JSON.")
def find(keyword: str, path: str, as_json: bool) -> None:
    """Look a name or a concept up, without building a site.

    Try:

    \b
      repopages find residual
      repopages find JSONDecoder json
    """  # noqa: D301
    found = look_up(keyword, path)
    if as_json:
        click.echo(json.dumps([{**asdict(entry), "url": entry.url} for entry in found], indent=2))
        return
    if not found:
        raise OptionError(f"keyword={keyword!r} is not in the index of {path}: try a part of it")
    for entry in found[:_MOST]:
        click.secho(entry.word, bold=True, nl=False)
        click.echo(f"  {entry.kind}  {entry.url}")
        if entry.summary:
            click.echo(f"    {entry.summary}")
    if len(found) > _MOST:
        click.echo(f"and {len(found) - _MOST} more", err=True)
