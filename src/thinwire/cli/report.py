"""`thinwire report`: one HTML page of a benchmark."""

from pathlib import Path

import click

from thinwire.bench.results import Results
from thinwire.cli.output import check_writable, err, out, print_json
from thinwire.errors import UnavailableError


@click.command()
@click.argument("results", type=click.Path(path_type=Path), default="bench.json")
@click.option("--out", "path", type=click.Path(path_type=Path), help="[default: RESULTS with .html]")
@click.option("--json", "as_json", is_flag=True, help="Path and size as JSON.")
def report(results: Path, path: Path | None, as_json: bool) -> None:
    """Make one self-contained HTML page from RESULTS (default: bench.json), and print its path."""
    try:
        from thinwire.report.page import render
    except ModuleNotFoundError as error:
        raise UnavailableError(f"the report needs {error.name}: pip install 'thinwire[report]'") from error
    loaded = Results.load(results)
    path = path or results.with_suffix(".html")
    check_writable(path)
    page = render(loaded)
    path.write_text(page, encoding="utf-8")
    if as_json:
        print_json({"path": str(path), "bytes": len(page.encode())})
    else:
        err.print("open in a browser:", style="dim")
        out.print(str(path.resolve()))
