"""`thinwire report`: one HTML page of a benchmark, or of a training log."""

from pathlib import Path

import click

from thinwire.bench.results import Results
from thinwire.cli.output import check_writable, err, out, print_json
from thinwire.errors import StateError, UnavailableError
from thinwire.telemetry.log import Log, is_log


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="bench.json")
@click.option("--out", "path", type=click.Path(path_type=Path), help="[default: FILE with .html]")
@click.option("--json", "as_json", is_flag=True, help="Path and size as JSON.")
def report(file: Path, path: Path | None, as_json: bool) -> None:
    """Make one self-contained HTML page from FILE (default: bench.json), and print its path.

    FILE is what thinwire bench has measured, or the log of a training that telemetry.JsonLines has written,
    of a run that is over or still goes on: what it sent, what audits found and what followed from them.
    """
    loaded = _load(file)
    path = path or file.with_suffix(".html")
    check_writable(path)
    page = _render(loaded, file.name)
    path.write_text(page, encoding="utf-8")
    if as_json:
        print_json({"path": str(path), "bytes": len(page.encode())})
    else:
        err.print("open in a browser:", style="dim")
        out.print(str(path.resolve()))


def _load(file: Path) -> Results | Log:
    if is_log(file):
        log = Log.load(file)
        if log.cut:
            err.print(f"{file}: the last line is cut off, and left out", style="dim")
        return log
    try:
        return Results.load(file)
    except StateError as error:
        if isinstance(error.__cause__, ValueError | KeyError | TypeError | AttributeError):
            raise StateError(f"{error}, and no training log of telemetry.JsonLines either") from error
        raise


def _render(loaded: Results | Log, name: str) -> str:
    try:
        from thinwire.report import page, training
    except ModuleNotFoundError as error:
        raise UnavailableError(f"the report needs {error.name}: pip install 'thinwire[report]'") from error
    return training.render(loaded, name) if isinstance(loaded, Log) else page.render(loaded)
