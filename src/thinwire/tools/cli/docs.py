"""The command `thinwire docs`, which looks up a keyword or builds a package's documentation."""

from dataclasses import asdict
from pathlib import Path

import click

from thinwire.docs.lookup import look_up
from thinwire.docs.site import build
from thinwire.errors import OptionError, StateError
from thinwire.tools.cli.output import err, out, print_json

_MOST = 20


@click.command(short_help="Look up a keyword, or build a package's documentation.")
@click.argument("keyword", required=False)
@click.option("--package", default="thinwire", show_default=True, help="Package to look the keyword up in.")
@click.option("--build", "built", metavar="PACKAGE", help="Build the site of a package, by name or folder.")
@click.option(
    "--out",
    "path",
    default="site",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of the site.",
)
@click.option("--strict", is_flag=True, help="Exit with code 1 if Sphinx warns.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def docs(
    keyword: str | None, package: str, built: str | None, path: Path, strict: bool, as_json: bool
) -> None:
    """Look up a keyword, or build the documentation of any Python package.

    Sources are parsed, not imported. The site works offline and has a page and a keyword index for each
    module.

    Try:

    \b
      thinwire docs residual
      thinwire docs --build mypackage --out site/
    """  # noqa: D301 - click needs the control character \b, not a raw string
    if built is not None:
        _build(built, path, strict=strict, as_json=as_json)
        return
    if not keyword:
        raise OptionError("there is no keyword: pass one, as in thinwire docs residual, or --build PACKAGE")
    found = look_up(keyword, package)
    if as_json:
        print_json([{**asdict(entry), "url": entry.url} for entry in found])
        return
    if not found:
        raise OptionError(f"keyword={keyword!r} is not in the index of {package}: try a part of it")
    for entry in found[:_MOST]:
        out.print(f"{entry.word}", style="bold", end="")
        out.print(f"  {entry.kind}  {entry.url}")
        if entry.summary:
            out.print(f"    {entry.summary}")
    if len(found) > _MOST:
        err.print(f"and {len(found) - _MOST} more", style="dim")


def _build(package: str, path: Path, *, strict: bool, as_json: bool) -> None:
    result = build(package, path)
    for line in result.warnings:
        err.print(line)
    if as_json:
        print_json({**asdict(result), "folder": str(path)})
    else:
        err.print(f"{result.pages} pages of modules, {result.keywords} keywords", style="dim")
        out.print(str((path / "index.html").resolve()))
    if strict and result.warnings:
        raise StateError(f"the site of {package} has {len(result.warnings)} warnings, shown above")
