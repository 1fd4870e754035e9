"""The command `thinwire bench`, which compares programs on several links and world sizes."""

import shlex
import sys
from pathlib import Path

import click

from thinwire.errors import OptionError, UnavailableError
from thinwire.tools.bench.advice import advise, summarize
from thinwire.tools.bench.grid import LOOPBACK, THREADS, Grid, run_grid
from thinwire.tools.bench.load import Load
from thinwire.tools.bench.parsing import PROGRAMS, split_programs
from thinwire.tools.bench.real import run_here, under_torchrun
from thinwire.tools.bench.results import REAL_LINK, Results
from thinwire.tools.bench.summary import rows
from thinwire.tools.bench.text import LEGEND
from thinwire.tools.bench.workloads import WORKLOADS
from thinwire.tools.cli.output import check_writable, err, out, print_json, tables, title
from thinwire.tools.cli.progress import progress
from thinwire.tools.lab.namespaces import way_in


@click.command()
@click.option(
    "--programs",
    default=",".join(PROGRAMS),
    show_default="all of thinwire's",
    help="Programs, separated by commas: Name(option=value), or package.module:Name for your own.",
)
@click.option(
    "--links",
    default="100mbit",
    show_default=True,
    help="Link rates, separated by commas. unlimited and loopback are allowed.",
)
@click.option("--hosts", default="2", show_default=True, help="World sizes, separated by commas.")
@click.option(
    "--workload",
    default="gpt-1m",
    show_default=True,
    type=click.Choice(list(WORKLOADS)),
    help="Built-in model to train.",
)
@click.option(
    "--model", metavar="MODULE:BUILD", help="Train your own model. build() must return (model, batch)."
)
@click.option("--steps", default=60, show_default=True, help="Rounds per link and world size.")
@click.option("--bucket-mb", type=float, help="DDP's bucket size in MB.  [default: by contestant]")
@click.option("--seeds", default=1, show_default=True, help="Trainings for losses, each with its own seed.")
@click.option(
    "--timed",
    type=int,
    help="Rounds to time on each link. Losses are then trained over loopback, once for all links, which makes"
    " slow links quick to measure.  [default: all steps]",
)
@click.option("--no-torch", is_flag=True, help="Do not run torch's own hooks and optimizers.")
@click.option(
    "--out",
    "path",
    default="bench.json",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Results file. If it exists, the benchmark is resumed.",
)
@click.option("--fresh", is_flag=True, help="Overwrite --out instead of resuming it.")
@click.option(
    "--or-loopback", is_flag=True, help="Measure over loopback if this machine cannot emulate links."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of tables.")
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
    seeds: int,
    timed: int | None,
    no_torch: bool,
    path: Path,
    fresh: bool,
    or_loopback: bool,
    as_json: bool,
) -> None:
    """Compare plain DDP, thinwire's programs and torch's own hooks on every link.

    The benchmark runs on emulated hosts of this machine, or on the real network if started by torchrun. An
    interrupted run is resumed by the same command.

    Try:

    \b
      thinwire bench --links 10mbit,100mbit,1gbit --hosts 2,4 --timed 36
      thinwire bench --model mypackage.train:build --programs exact,bf16
      torchrun --nnodes 2 ... -m thinwire bench
    """  # noqa: D301 - click needs the control character \b, not a raw string
    check_writable(path)
    grid = Grid(
        workload=model or workload,
        programs=tuple(split_programs(programs)),
        links=_links(links, or_loopback=or_loopback),
        hosts=tuple(_whole_number(part) for part in hosts.split(",")),
        steps=steps,
        bucket_mb=bucket_mb,
        with_torch=not no_torch,
        seeds=seeds,
        timed=timed,
    )
    if under_torchrun():
        with progress(steps) as tracker:
            results = run_here(
                grid, path, _command(), fresh=fresh, on_round=lambda kind, done: tracker(REAL_LINK, done)
            )
        if results is None:
            return
    else:
        with progress(grid.all_rounds) as tracker:
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
            f"measuring over loopback, where fewer bytes save no time, without the lab: {error}", style="bold"
        )
        return (LOOPBACK,)
    return links


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"hosts={text!r} is not a whole number: pass world sizes such as 2,4") from None


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
        advice = advise(cell)
        out.print(advice.text, style="bold")
        if advice.line:
            out.print(f"\n    {advice.line}", style="bold")
        out.print()
        if cell.cores:
            load, threads = Load(cores=cell.cores, others=cell.other_cores), results.machine.get(THREADS)
            noun = "thread" if str(threads) == "1" else "threads"
            err.print(f"measured with {threads} {noun} per rank, while {load}", style="dim")
    err.print(LEGEND, style="dim")
