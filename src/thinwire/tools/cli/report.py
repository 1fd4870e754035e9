"""The command `thinwire report`, which makes an HTML page of a benchmark or a training log."""

from pathlib import Path

import click

from thinwire.errors import StateError, UnavailableError
from thinwire.telemetry.log import Log, is_log
from thinwire.tools.bench.results import Results
from thinwire.tools.cli.output import check_writable, err, write_page


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="bench.json")
@click.option(
    "--out", "path", type=click.Path(path_type=Path), help="HTML file to write.  [default: FILE with .html]"
)
@click.option("--json", "as_json", is_flag=True, help="Print path and size as JSON.")
def report(file: Path, path: Path | None, as_json: bool) -> None:
    """Make a self-contained HTML page from FILE (default: bench.json), and print its path.

    FILE is a results file of thinwire bench, or a training log of telemetry.JsonLines. The training may be
    finished or still running. The page of a log shows a verdict, the loss, the time of a step, bytes, audits
    and the actions that followed.

    Try:

    \b
      thinwire report bench.json
      thinwire report steps.jsonl --out steps.html
    """  # noqa: D301 - click needs the control character \b, not a raw string
    loaded = _load(file)
    path = path or file.with_suffix(".html")
    check_writable(path)
    page = _render(loaded, file.name)
    write_page(path, page, as_json=as_json)


def _load(file: Path) -> Results | Log:
    if is_log(file):
        log = Log.load(file)
        if log.cut:
            err.print(f"{file}: the last line is incomplete and is ignored", style="dim")
        return log
    try:
        return Results.load(file)
    except StateError as error:
        if isinstance(error.__cause__, ValueError | KeyError | TypeError | AttributeError):
            raise StateError(f"{error}, nor a training log of telemetry.JsonLines") from error
        raise


def _render(loaded: Results | Log, name: str) -> str:
    try:
        from thinwire.tools.report import page, training
    except ModuleNotFoundError as error:
        raise UnavailableError(f"the report needs {error.name}: pip install plotly") from error
    return training.render(loaded, name) if isinstance(loaded, Log) else page.render(loaded)
