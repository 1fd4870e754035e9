"""`thinwire`: the group of commands, and what its exit codes mean.

0 done · 1 failed · 2 wrong usage · 3 not possible on this machine · 130 interrupted.
`thinwire lab` ends with the exit code of the command it ran.
"""

from typing import Any

import click

from thinwire.cli.bench import bench
from thinwire.cli.doctor import doctor
from thinwire.cli.lab import lab
from thinwire.cli.report import report
from thinwire.errors import OptionError, ThinwireError, UnavailableError
from thinwire.version import __version__

_CODES: list[tuple[type[ThinwireError], int]] = [(OptionError, 2), (UnavailableError, 3), (ThinwireError, 1)]


class Commands(click.Group):
    """Shows expected errors without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ThinwireError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(next(code for kind, code in _CODES if isinstance(error, kind)))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="thinwire")
def cli() -> None:
    """Fast and safe PyTorch data-parallel training on slow networks: is it worth it on yours?

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not possible on this machine, 130 interrupted; lab ends
    with the exit code of the command it ran.
    """


for command in (lab, bench, report, doctor):
    cli.add_command(command)
