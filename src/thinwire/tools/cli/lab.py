"""The command `thinwire lab`, which runs any distributed command on emulated hosts with slow links."""

from collections.abc import Callable

import click
from rich.text import Text

from thinwire.errors import OptionError
from thinwire.plan.units import show_bytes
from thinwire.tools.cli.output import err, out, print_json
from thinwire.tools.lab.namespaces import Lab, clean
from thinwire.tools.lab.network import plan
from thinwire.tools.lab.run import Finished, run_on

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--hosts", type=int, help="Number of emulated hosts.  [default: 2, or as in --groups]")
@click.option(
    "--rate",
    default="100mbit",
    show_default=True,
    help="Rate of slow links, 100kbit to 100gbit or unlimited. Pass one, or one per host or group.",
)
@click.option(
    "--groups", metavar="GxH", help="2x3 makes two groups of three hosts, with slow links between groups."
)
@click.option("--inside", default="unlimited", show_default=True, help="Rate of the links within a group.")
@click.option("--delay", type=float, default=0.0, help="Milliseconds added by each slow link (needs netem).")
@click.option(
    "--loss", type=float, default=0.0, help="Per cent of packets lost by each slow link (needs netem)."
)
@click.option(
    "--clean", "cleaning", is_flag=True, help="End the remains of labs whose owner has ended, then exit."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a summary as JSON. COMMAND's lines go to stderr."
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
    """Run COMMAND on emulated hosts of this machine, each behind a throttled link.

    Every host is a network namespace. COMMAND starts once on each host, as one rank (RANK, WORLD_SIZE and
    MASTER_ADDR are set), or as one node if it is torchrun. Root is not needed if the system allows user
    namespaces.

    Try:

    \b
      thinwire lab --hosts 4 --rate 100mbit -- python train.py
      thinwire lab --groups 2x2 --rate 10mbit --inside 10gbit -- python train.py
      thinwire lab --hosts 2 -- torchrun --nproc-per-node 2 train.py
    """  # noqa: D301 - click needs the control character \b, not a raw string
    if cleaning:
        _clean(as_json=as_json)
        return
    network = plan(hosts=hosts, rate=rate, groups=groups, inside=inside, delay=delay, loss=loss)
    if not command:
        raise OptionError(
            "there is no command to run: write it after --, as in thinwire lab -- python train.py"
        )
    with Lab(network) as emulated:
        err.print(f"lab: {network}", style="dim")
        finished = run_on(emulated, command, _printer(to_stderr=as_json))
    if as_json:
        print_json(_summary(str(network), finished))
    else:
        _print_summary(finished)
    ctx.exit(finished.exit_code)


def _clean(*, as_json: bool) -> None:
    removed = clean()
    if as_json:
        print_json({"removed": removed})
    else:
        err.print(f"removed {removed} orphaned lab(s)" if removed else "no orphaned labs")


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
        "bytes_between": finished.bytes_between,
    }


def _print_summary(finished: Finished) -> None:
    sent = ", ".join(
        f"host {host} {show_bytes(count)}" for host, count in enumerate(finished.bytes_sent or ())
    )
    err.print(f"lab: {finished.seconds:.1f} s; sent: {sent}", style="dim")
    if finished.bytes_between is not None:
        crossed = ", ".join(
            f"group {group} {show_bytes(count)}" for group, count in enumerate(finished.bytes_between)
        )
        err.print(f"lab: of these to other groups: {crossed}", style="dim")
    if finished.failed_host is not None:
        err.print(
            f"lab: host {finished.failed_host} failed (exit code {finished.exit_code}); others were stopped",
            style="bold red",
        )
