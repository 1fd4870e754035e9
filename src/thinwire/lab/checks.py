"""What this machine has and has not, for `thinwire doctor`."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.errors import UnavailableError
from thinwire.lab.namespaces import try_inside, way_in
from thinwire.version import __version__

_OPTIONAL = {
    "click": "the command line: pip install 'thinwire[cli]'",
    "rich": "the command line: pip install 'thinwire[cli]'",
    "plotly": "the report: pip install 'thinwire[report]'",
    "tensorboard": "the TensorBoard sink: pip install tensorboard",
    "wandb": "the W&B sink: pip install wandb",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        needed: Whether thinwire or its lab cannot do without.
        remedy: What to do where it is not there.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Look at everything that thinwire can use."""
    return [
        Finding("thinwire", True, __version__),
        Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.release()}"),
        Finding("torch", True, str(torch.__version__)),
        *_backends(),
        _devices(),
        Finding("cores", True, str(os.cpu_count())),
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


def _lab() -> list[Finding]:
    """Opens namespaces for real: a kernel that has them may still refuse them."""
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
