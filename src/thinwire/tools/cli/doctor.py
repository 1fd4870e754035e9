"""The command `thinwire doctor`, which lists installed and missing components, and how to install them."""

import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from thinwire.errors import UnavailableError
from thinwire.kernels import library
from thinwire.kernels.triton import launch
from thinwire.tools.cli.output import err, out, print_json
from thinwire.tools.lab.interfaces import VARIABLE, Interface, default_route, gloo_interface, interfaces
from thinwire.tools.lab.namespaces import try_inside, way_in
from thinwire.version import __version__

OK, MISSING, NO = Text("ok", "green"), Text("missing", "red"), Text("no", "yellow")
_OPTIONAL = {
    "numpy": "torch.distributed.checkpoint, powerSGD_hook and thinwire bench: pip install numpy",
    "click": "the command line: pip install click",
    "rich": "the command line: pip install rich",
    "plotly": "the report: pip install plotly",
    "tensorboard": "the TensorBoard sink: pip install tensorboard",
    "wandb": "the W&B sink: pip install wandb",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print all findings as JSON.")
@click.option("--accelerator", is_flag=True, help="Test the accelerator on all ranks of a torchrun job.")
@click.option(
    "--out",
    "path",
    type=click.Path(path_type=Path),
    default=Path("accelerator.json"),
    show_default=True,
    help="With --accelerator: the file for all figures, without host names.",
)
@click.option("--device", help="With --accelerator: the type of device. Default: the one that torch finds.")
@click.option("--backend", help="With --accelerator: the backend. Default: torch's for the device.")
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="With --accelerator: import a module first, such as torch_npu.",
)
@click.option(
    "--parameters",
    default=100_000_000,
    show_default=True,
    type=click.IntRange(10_000),
    help="With --accelerator: size of the model for memory and speed.",
)
@click.option(
    "--limit",
    default=0.0,
    type=click.FloatRange(0),
    help="With --accelerator: seconds after which a check counts as hung. Default: each has its own limit.",
)
@click.option("--only", multiple=True, metavar="CHECK", help="With --accelerator: run only this check.")
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, accelerator: bool, **asked: Any) -> None:
    """Show versions, backends and the requirements of the lab.

    The exit code is 1 if a required component is missing. Optional components are listed with their use.
    With --accelerator, every rank tests its device: groups, collectives, bits, order on streams, faults,
    memory and speed. The exit code is then 1 if a check found anything. It takes under four minutes.

    Try:

    \b
      thinwire doctor
      torchrun --nproc-per-node=2 -m thinwire doctor --accelerator
    """  # noqa: D301 - click needs the control character \b, not a raw string
    if accelerator:
        from thinwire.tools.cli.accelerator import examine_accelerator

        ctx.exit(examine_accelerator(as_json=as_json, **asked))
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


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: The component that was checked.
        ok: Whether it is available.
        detail: Its version, or the reason why it is not available.
        remedy: The way to install or enable it.
        needed: Whether thinwire or its lab fails without it.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Check every component that thinwire can use.

    Returns:
        One finding for each component, in the order in which `thinwire doctor` shows them.
    """
    return [
        Finding("thinwire", True, __version__),
        Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.release()}"),
        Finding("torch", True, str(torch.__version__)),
        *_backends(),
        _devices(),
        Finding("cores", True, str(os.cpu_count())),
        network(interfaces(), default_route()),
        _kernels(),
        *_gpu_kernels(),
        _compiler(),
        *_lab(),
        *(_package(name, remedy) for name, remedy in _OPTIONAL.items()),
    ]


def _backends() -> list[Finding]:
    return [
        Finding(
            "gloo",
            dist.is_gloo_available(),
            "backend for CPU" if dist.is_gloo_available() else "not built into this torch",
            "install a torch that has it",
            needed=not torch.cuda.is_available(),
        ),
        Finding(
            "nccl",
            dist.is_nccl_available(),
            "backend for GPUs" if dist.is_nccl_available() else "not built into this torch",
            "only GPUs need it",
        ),
    ]


def _devices() -> Finding:
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return Finding("GPUs", count > 0, names or "none", "thinwire runs on the CPU, with Gloo")


def _kernels() -> Finding:
    in_use, detail, remedy = library.status()
    return Finding("kernels", in_use, f"native code in use, {detail}" if in_use else detail, remedy)


def _gpu_kernels() -> list[Finding]:
    """Return whether Triton's kernels are in use, where there is a GPU for them."""
    if not torch.cuda.is_available() and not torch.xpu.is_available():
        return []
    in_use, detail, remedy = launch.status()
    return [Finding("kernels on GPUs", in_use, detail, remedy)]


def _compiler() -> Finding:
    """Return whether there is a C compiler, which builds kernels when thinwire is installed."""
    path = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    return Finding("compiler", path is not None, path or "none", "only building native code needs it")


def network(up: list[Interface], route: str | None) -> Finding:
    """Return the interface that Gloo will use between hosts, with a warning if it may be the wrong one.

    Args:
        up: The interfaces that are up.
        route: The interface of the default route, or None.
    """
    chosen, why = gloo_interface(up)
    others = [interface.name for interface in up if interface is not chosen and interface.name != "lo"]
    remedy = f"export {VARIABLE}={route or 'eth0'} on every host, with the interface between the hosts"
    if chosen is None:
        return Finding("network", False, f"Gloo finds no interface {why}", remedy)
    detail = f"Gloo uses {chosen} {why}"
    if chosen.name == "lo" and others:
        return Finding("network", False, f"{detail}, which other hosts cannot reach", remedy)
    if route is not None and chosen.name not in ("lo", route):
        return Finding("network", False, f"{detail}, but the default route is {route}", remedy)
    if others and not os.environ.get(VARIABLE):
        return Finding("network", False, f"{detail}, but {', '.join(others)} is up too", remedy)
    return Finding("network", True, detail)


def _lab() -> list[Finding]:
    """Open real namespaces, because a kernel that supports them may still deny permission."""
    try:
        way = way_in()
    except UnavailableError as error:
        return [Finding("lab", False, "not possible here", str(error), needed=True)]
    version = try_inside(way, "ip -V").stdout.strip()
    how = "as root" if not way else "without root, by a user namespace"
    return [
        Finding("lab", True, f"{how}; {version}"),
        _qdisc(way, "tbf", "tbf rate 10mbit burst 8192 latency 100ms", "limits rates", needed=True),
        _qdisc(way, "netem", "netem delay 1ms", "delays and loses packets", needed=False),
    ]


def _qdisc(way: list[str], kind: str, options: str, what: str, *, needed: bool) -> Finding:
    attempt = try_inside(way, f"tc qdisc add dev lo root {options}")
    remedy = f"the lab cannot emulate it; load the module sch_{kind}"
    detail = what if attempt.returncode == 0 else f"{what}, but this kernel says: {attempt.stderr.strip()}"
    return Finding(kind, attempt.returncode == 0, detail, remedy, needed=needed)


def _package(name: str, remedy: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", f"for {remedy}")
