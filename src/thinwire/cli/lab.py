"""`thinwire lab`: any distributed command on emulated hosts with slow links."""

from collections.abc import Callable

import click
from rich.text import Text

from thinwire.bench.words import megabytes
from thinwire.cli.output import err, out, print_json
from thinwire.errors import OptionError
from thinwire.lab.namespaces import Lab, clean
from thinwire.lab.network import plan
from thinwire.lab.run import Finished, run_on

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--hosts", type=int, help="How many emulated hosts.  [default: 2, or what --groups makes]")
@click.option(
    "--rate",
    default="100mbit",
    show_default=True,
    help="Of every slow link, 100kbit to 100gbit or unlimited; with commas one for each host (or group).",
)
@click.option("--groups", metavar="GxH", help="2x3: two groups of three hosts; --rate is between the groups.")
@click.option("--inside", default="unlimited", show_default=True, help="Rate of each host within its group.")
@click.option("--delay", type=float, default=0.0, help="Milliseconds added by each slow link (needs netem).")
@click.option(
    "--loss", type=float, default=0.0, help="Per cent of packets lost by each slow link (needs netem)."
)
@click.option(
    "--clean", "cleaning", is_flag=True, help="End leftovers of labs whose owner is gone, and return."
)
@click.option(
    "--json", "as_json", is_flag=True, help="A summary as JSON on stdout; the command's lines on stderr."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def lab(
    ctx: click.Context,
    hosts: int | None,
    rate: str,
    groups: str | None,
    inside: str,
    delay: float,
    loss: float,
    cleaning: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    r"""Run COMMAND on emulated hosts of this machine, each behind a throttled link.

    Every host is a network namespace; COMMAND starts once on each, as one rank (RANK, WORLD_SIZE,
    MASTER_ADDR are set) or, if it is torchrun, as one node. No root needed where user namespaces are allowed.

    \b
    thinwire lab --hosts 4 --rate 100mbit -- python train.py
    thinwire lab --groups 2x2 --rate 10mbit --inside 10gbit -- torchrun --nproc-per-node 1 train.py
    """
    if cleaning:
        _clean(as_json=as_json)
        return
    network = plan(hosts=hosts, rate=rate, groups=groups, inside=inside, delay=delay, loss=loss)
    if not command:
        raise OptionError("there is no command to run: thinwire lab --hosts 2 -- python train.py")
    with Lab(network) as emulated:
        err.print(f"lab: {network}", style="dim")
        finished = run_on(emulated, command, _printer(to_stderr=as_json))
    if as_json:
        print_json(_summary(str(network), finished))
    else:
        _tell(finished)
    ctx.exit(finished.exit_code)


def _clean(*, as_json: bool) -> None:
    removed = clean()
    if as_json:
        print_json({"removed": removed})
    else:
        err.print(f"removed {removed} leftover lab(s)" if removed else "nothing is left over")


def _printer(*, to_stderr: bool) -> Callable[[int, str, str], None]:
    def show(host: int, stream: str, line: str) -> None:
        console = err if to_stderr or stream == "stderr" else out
        console.print(Text.assemble((f"host {host} | ", _STYLES[host % len(_STYLES)]), line))

    return show


def _summary(network: str, finished: Finished) -> dict[str, object]:
    return {
        "network": network,
        "seconds": finished.seconds,
        "exit_code": finished.exit_code,
        "failed_host": finished.failed_host,
        "bytes_sent": finished.bytes_sent,
    }


def _tell(finished: Finished) -> None:
    sent = ", ".join(
        f"host {host} {megabytes(count)}" for host, count in enumerate(finished.bytes_sent or ())
    )
    err.print(f"lab: {finished.seconds:.1f} s; sent: {sent}", style="dim")
    if finished.failed_host is not None:
        err.print(
            f"lab: host {finished.failed_host} failed (exit code {finished.exit_code}); others were stopped",
            style="bold red",
        )
