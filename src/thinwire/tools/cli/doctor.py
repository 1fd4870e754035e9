"""The command `thinwire doctor`, which lists installed and missing components, and how to install them."""

from dataclasses import asdict

import click
from rich.table import Table
from rich.text import Text

from thinwire.tools.cli.output import err, out, print_json
from thinwire.tools.lab.checks import examine

OK, MISSING, NO = Text("ok", "green"), Text("missing", "red"), Text("no", "yellow")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show versions, backends and the requirements of the lab.

    The exit code is 1 if a required component is missing. Optional components are listed with their use.
    """
    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        shown = Table(box=None, show_header=False)
        shown.add_column(no_wrap=True)
        shown.add_column(no_wrap=True)
        shown.add_column()
        for finding in findings:
            mark = OK if finding.ok else MISSING if finding.needed else NO
            shown.add_row(
                mark, finding.name, finding.detail if finding.ok else f"{finding.detail}: {finding.remedy}"
            )
        out.print(shown)
    missing = [finding.name for finding in findings if finding.needed and not finding.ok]
    if missing:
        err.print(f"missing: {', '.join(missing)}", style="bold red")
    ctx.exit(1 if missing else 0)
