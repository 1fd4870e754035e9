"""The command `thinwire`, outside the package so that its help appears at once: the package imports torch.

A command is a file in `thinwire/tools/cli/` with a function decorated by `click.command`. Names and first
lines are read from these files. The file is imported when its command runs.

Exit codes: 0 done · 1 failed · 2 wrong usage · 3 not possible on this machine · 130 interrupted.
`thinwire lab` ends with the exit code of the command it ran.
"""

import ast
import errno
import importlib
import importlib.util
import re
import signal
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

try:
    import click
    from click.shell_completion import CompletionItem
except ModuleNotFoundError:
    sys.exit("thinwire's command line needs click: pip install click rich numpy")

_CODES = (("OptionError", 2), ("UnavailableError", 3), ("ThinwireError", 1))
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_SIGNALLED = {128 + number for number in _SIGNALS}


def package_folder() -> Path:
    """Return the folder of the package without importing it."""
    spec = importlib.util.find_spec("thinwire")
    if spec is None or spec.origin is None:
        sys.exit("the package thinwire cannot be found: pip install -e . in its checkout")
    return Path(spec.origin).parent


class Commands(click.Group):
    """A group of commands, imported when they run. It prints thinwire's errors without a traceback."""

    @cached_property
    def found(self) -> dict[str, tuple[str, str]]:
        """The module and the first line of the help of each command, by its name."""
        commands = {}
        for path in sorted((package_folder() / "tools" / "cli").glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and any(
                    ast.unparse(decorator).startswith("click.command") for decorator in node.decorator_list
                ):
                    about = (ast.get_docstring(node) or "").partition("\n")[0]
                    commands[node.name.replace("_", "-")] = (f"thinwire.tools.cli.{path.stem}", about)
        return commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(self.found)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, or return None if there is none of that name."""
        if cmd_name not in self.found:
            return None
        try:
            module = importlib.import_module(self.found[cmd_name][0])
        except ModuleNotFoundError as error:
            if error.name not in ("numpy", "rich"):
                raise
            sys.exit(f"thinwire's command line needs {error.name}: pip install click rich numpy")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands and their first lines without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self.found.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin with `incomplete`, without importing any."""
        names = [CompletionItem(name, help=about) for name, (_, about) in self.found.items()]
        return [
            *(item for item in names if item.value.startswith(incomplete)),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand, and turn thinwire's errors into exit codes.

        Commands end by `ctx.exit`, so `sys.exit` comes from a signal or from the code of a user's model. An
        OSError is of the machine, such as a full disk. What else is raised is a defect, with a traceback.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        except SystemExit as error:
            if isinstance(error.code, str) or error.code in _SIGNALLED:
                raise
            click.echo(f"Error: the code of the model or program called sys.exit({error.code})", err=True)
            ctx.exit(1)
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends silently if the reader of a pipe has gone
                raise
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"Error: {where}{error.strerror or error}", err=True)
            ctx.exit(1)
        except Exception as error:
            kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "thinwire.errors"}
            if not kinds:
                raise
            click.echo(f"Error: {error}", err=True)
            ctx.exit(next(code for kind, code in _CODES if kind in kinds))


def _version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        text = (package_folder() / "version.py").read_text(encoding="utf-8")
        found = re.search(r'__version__ = "([^"]+)"', text)
        click.echo(f"thinwire, version {found[1] if found else 'unknown'}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Measure whether thinwire speeds up PyTorch data-parallel training on your network.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not possible on this machine, 130 interrupted. lab ends
    with the exit code of the command it ran.
    """


def main() -> None:
    """Start the command line."""
    for number in _SIGNALS:  # clean up as on Ctrl-C, but respect nohup
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    cli(prog_name="thinwire")
