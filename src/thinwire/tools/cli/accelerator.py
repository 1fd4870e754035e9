"""The output of `thinwire doctor --accelerator`: one block to paste, and one JSON file."""

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import OptionError, UnavailableError
from thinwire.tools.cli.output import check_writable, out, print_json
from thinwire.tools.doctor.check import Outcome
from thinwire.tools.doctor.child import CHECKS
from thinwire.tools.doctor.facts import without_host_names
from thinwire.tools.doctor.supervisor import Request, examine, passed
from thinwire.version import __version__

_COMMAND = "torchrun --nproc-per-node=2 -m thinwire doctor --accelerator"


def examine_accelerator(
    *,
    as_json: bool,
    path: Path,
    device: str | None,
    backend: str | None,
    imports: tuple[str, ...],
    parameters: int,
    only: tuple[str, ...],
    limit: float,
) -> int:
    """Run all checks, and print their results on rank 0.

    Returns:
        The exit code: 0 if no check found anything, else 1.

    Raises:
        OptionError: The job has fewer than two ranks, or a check is unknown.
        UnavailableError: Torch finds no accelerator.
    """
    for module in imports:
        _import(module)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise OptionError(f"--accelerator tests two ranks or more, one per device: run {_COMMAND}")
    unknown = set(only) - CHECKS.keys()
    if unknown:
        raise OptionError(
            f"--only {', '.join(sorted(unknown))} is not a check: choose from {', '.join(CHECKS)}"
        )
    request = replace(_request(device, backend, imports, parameters, only), limit=limit)
    first = os.environ["RANK"] == "0"
    if first:
        check_writable(path)
        if not as_json:
            _print_head(request)

    def finish(report: dict[str, Any]) -> None:
        report["thinwire"], report["torch"] = __version__, torch.__version__
        text = without_host_names(json.dumps(report, indent=1))
        path.write_text(text + "\n", encoding="utf-8")
        if as_json:
            print_json(json.loads(text))
        else:
            _print_end(report, path)

    report = examine(request, _print_row if not as_json else lambda name, outcome, seconds: None, finish)
    return 0 if passed(report) else 1


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"--import {module} failed ({error}): pass the name of an installed module"
        ) from error


def _request(
    device: str | None, backend: str | None, imports: tuple[str, ...], parameters: int, only: tuple[str, ...]
) -> Request:
    # A torch that is built for CUDA names it on machines without a GPU too.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = device or (found.type if found is not None else None)
    if kind is None:
        raise UnavailableError(
            "torch finds no accelerator: install a torch that is built for it, or try the checks with"
            " --device cpu"
        )
    _require_devices(kind)
    chosen = backend or dist.get_default_backend_for_device(kind)
    checks = tuple(name for name in CHECKS if not only or name in only)
    return Request(kind, chosen, imports, parameters, checks)


def _require_devices(kind: str) -> None:
    """Raise OptionError if this machine has fewer devices than ranks, each of which needs one."""
    count = getattr(torch.get_device_module(kind), "device_count", None)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if kind != "cpu" and callable(count) and count() < ranks:
        raise OptionError(
            f"{ranks} ranks run on this machine, which shows them {count()} of type {kind}: each rank"
            " needs one; lower --nproc-per-node, or let every rank see all devices (CUDA_VISIBLE_DEVICES)"
        )


def _print_head(request: Request) -> None:
    size = os.environ["WORLD_SIZE"]
    out.print(
        f"thinwire {__version__} doctor --accelerator: {request.device}, {request.backend}, {size} ranks"
    )


def _print_row(name: str, outcome: Outcome, seconds: float) -> None:
    out.print(f"{outcome.verdict:8} {name:16} {seconds:5.1f} s  {without_host_names(outcome.text)}")


def _print_end(report: dict[str, Any], path: Path) -> None:
    found = [name for name, check in report["checks"].items() if check["verdict"] not in ("ok", "skipped")]
    total = sum(check["seconds"] for check in report["checks"].values())
    verdict = f"look at: {', '.join(found)}" if found else "no check found anything"
    out.print(f"{verdict}; {total:.0f} s. All figures, without host names: {path}")
