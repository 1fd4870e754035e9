"""`thinwire bench`: programs, links and world sizes side by side."""

import shlex
import sys
from pathlib import Path

import click

from thinwire.bench.contestants import PROGRAMS, split_programs
from thinwire.bench.grid import LOOPBACK, Grid, run_grid
from thinwire.bench.real import LINK, run_here, under_torchrun
from thinwire.bench.results import Results
from thinwire.bench.summary import advice, rows, summarize
from thinwire.bench.words import LEGEND
from thinwire.bench.workloads import WORKLOADS
from thinwire.cli.output import check_writable, err, out, print_json
from thinwire.cli.progress import progress
from thinwire.cli.table import tables, title
from thinwire.errors import OptionError, UnavailableError
from thinwire.lab.namespaces import way_in


@click.command()
@click.option(
    "--programs",
    default=",".join(PROGRAMS),
    show_default=True,
    help="With commas; Name(option=value), or package.module:Name of your own.",
)
@click.option(
    "--links", default="100mbit", show_default=True, help="Rates with commas; unlimited and loopback too."
)
@click.option("--hosts", default="2", show_default=True, help="World sizes, with commas.")
@click.option("--workload", default="gpt-1m", show_default=True, type=click.Choice(list(WORKLOADS)))
@click.option("--model", metavar="MODULE:BUILD", help="Your own: build() returns (model, batch).")
@click.option("--steps", default=60, show_default=True, help="Rounds for each link and world size.")
@click.option("--bucket-mb", type=float, help="DDP's bucket_cap_mb.  [default: DDP's own]")
@click.option("--no-torch", is_flag=True, help="Leave torch's own hooks out.")
@click.option("--out", "path", default="bench.json", show_default=True, type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Start anew where --out holds a benchmark already.")
@click.option(
    "--or-loopback", is_flag=True, help="Where the lab is impossible, say why and measure over loopback."
)
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON on stdout instead of a table.")
@click.pass_context
def bench(
    ctx: click.Context,
    programs: str,
    links: str,
    hosts: str,
    workload: str,
    model: str | None,
    steps: int,
    bucket_mb: float | None,
    no_torch: bool,
    path: Path,
    fresh: bool,
    or_loopback: bool,
    as_json: bool,
) -> None:
    r"""Train side by side, on every link: plain DDP, thinwire's programs, torch's own hooks.

    Runs on emulated hosts of this machine, or, started under torchrun, on the real network. A run that was
    stopped goes on where it was.

    \b
    thinwire bench --links 10mbit,100mbit,1gbit --hosts 2,4
    thinwire bench --model mypackage.train:build --programs exact,bf16
    torchrun --nnodes 2 ... -m thinwire bench
    """
    check_writable(path)
    grid = Grid(
        workload=model or workload,
        programs=tuple(split_programs(programs)),
        links=_links(links, or_loopback=or_loopback),
        hosts=tuple(_whole_number(part) for part in hosts.split(",")),
        steps=steps,
        bucket_mb=bucket_mb,
        with_torch=not no_torch,
    )
    if under_torchrun():
        with progress(steps) as tracker:
            results = run_here(
                grid, path, _command(), fresh=fresh, on_round=lambda kind, done: tracker(LINK, done)
            )
        if results is None:
            return
    else:
        with progress(steps * len(grid.cells)) as tracker:
            results = run_grid(grid, path, _command(), fresh=fresh, on_progress=tracker, on_line=_show_line)
    _show(results, as_json=as_json)
    err.print(f"results: {path}", style="dim")
    asked = {(hosts, link) for hosts, link in grid.cells}
    ctx.exit(1 if any(cell.error and (cell.hosts, cell.link) in asked for cell in results.cells) else 0)


def _links(text: str, *, or_loopback: bool) -> tuple[str, ...]:
    links = tuple(part.strip() for part in text.split(","))
    if under_torchrun() or all(link == LOOPBACK for link in links):
        return links
    try:
        way_in()
    except UnavailableError as error:
        if not or_loopback:
            raise
        err.print(
            f"no lab, so this measures over loopback, where fewer bytes save no time: {error}", style="bold"
        )
        return (LOOPBACK,)
    return links


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"hosts={text!r} is not a whole number: give world sizes such as 2,4") from None


def _command() -> str:
    return shlex.join(["thinwire", *sys.argv[1:]])


def _show_line(line: str) -> None:
    err.print(line, style="dim")


def _show(results: Results, *, as_json: bool) -> None:
    if as_json:
        print_json(summarize(results))
        return
    for cell in results.cells:
        if cell.error is None:
            out.print(f"\n{title(cell)}\n", style="bold")
            for table in tables(cell):
                out.print(table, "", soft_wrap=False)
            for row in rows(cell):
                if row.unavailable:
                    out.print(f"{row.name}: {row.unavailable}")
        out.print(f"{advice(cell)}\n", style="bold")
    err.print(LEGEND, style="dim")
