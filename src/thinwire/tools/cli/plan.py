"""The command `thinwire plan`, which predicts what each program costs on a network, without training."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from thinwire.errors import OptionError, UnavailableError
from thinwire.plan.devices import DEVICES, TOKENS
from thinwire.plan.network import Network
from thinwire.plan.probe import probe_group
from thinwire.plan.recommend import MAX_GAP, recommend
from thinwire.plan.text import device_terms
from thinwire.telemetry.log import Log, is_log
from thinwire.tools.bench.load import measuring
from thinwire.tools.bench.real import under_torchrun
from thinwire.tools.bench.results import Results
from thinwire.tools.cli.output import check_writable, write_page
from thinwire.tools.cli.plan_request import Request
from thinwire.tools.cli.plan_tables import (
    check_log,
    check_results,
    show_checks,
    show_device_plan,
    show_plan,
    show_sizes,
)

_FILE = click.Path(path_type=Path)


@click.command()
@click.option(
    "--model",
    metavar="MODULE:BUILD",
    help="Your model: build() returns (model, batch). Or gpt-1m, gpt-6m, conv.",
)
@click.option("--parameters", type=float, help="Plan for a transformer of this many parameters, such as 7e9.")
@click.option(
    "--compute", help="Time of a step without communication, such as 0.4s.  [default: measured here]"
)
@click.option(
    "--device",
    help=f"Predict for a GPU from its data sheet and measure nothing here: {', '.join(DEVICES)}.",
)
@click.option("--tokens", type=float, help=f"Tokens per GPU and step, with --device.  [default: {TOKENS}]")
@click.option("--hosts", help="World size: 8, or 2,4,8, or a range 2..4096.")
@click.option("--link", help="Rate of every host's link, such as 100mbit, 25GB/s or unlimited.")
@click.option("--up", help="Rate at which a host sends, if it differs from --link.")
@click.option("--down", help="Rate at which a host receives, if it differs from --link.")
@click.option("--rtt", default="0.2ms", show_default=True, help="Round trip between two hosts.")
@click.option("--steps", type=int, help="Steps of the training, for its predicted duration.")
@click.option(
    "--programs", help="Programs to compare, as for thinwire bench.  [default: those with known loss]"
)
@click.option("--max-gap", default=f"{100 * MAX_GAP:g}%", show_default=True, help="Largest loss gap.")
@click.option("--max-memory", help="Most memory beyond plain DDP's, such as 500MB.")
@click.option("--exclude", default="", help="Programs that are not recommended, separated by commas.")
@click.option(
    "--gaps", "results", type=_FILE, help="Results file of thinwire bench on your model, for loss gaps."
)
@click.option(
    "--check",
    type=_FILE,
    help="Compare predictions with a results file or a training log, term by term. Your own code that FILE"
    " names runs only if --model or --programs name it too.",
)
@click.option(
    "--plot",
    type=_FILE,
    is_flag=False,
    flag_value=Path("plan.html"),
    help="Write a page of curves over hosts and bandwidth.  [default: plan.html]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(as_json: bool, check: Path | None, plot: Path | None, **options: Any) -> None:
    """Predict whether compression pays on a network, and recommend a program or none.

    One forward and backward is measured here, unless --compute passes its time, and so is the speed of every
    program. Bytes come from the programs themselves. Under torchrun the network between the ranks is probed.

    \b
    thinwire plan --model mypackage.train:build --hosts 8 --link 100mbit --rtt 20ms --steps 20000
    thinwire plan --parameters 7e9 --compute 0.4s --hosts 64 --link 10gbit
    thinwire plan --device h100 --parameters 7e9 --hosts 8 --link 10gbit
    thinwire plan --model gpt-6m --hosts 2..4096 --link 10gbit --plot
    thinwire plan --check bench.json
    torchrun --nnodes 2 ... -m thinwire plan --model mypackage.train:build
    """  # noqa: D301 - click needs the control character \b, not a raw string
    request = Request(**options)
    if request.gpu is not None and (check is not None or under_torchrun()):
        measured = "--check compares with" if check is not None else "torchrun probes the network for"
        raise OptionError(
            f"--device plans without measurements, and {measured} measurements: leave out one of them"
        )
    if check is not None and not is_log(check):
        results = Results.load(check)
        with measuring():
            checks = check_results(results, request.model, request.named)
        show_checks(checks, as_json=as_json)
        return
    if plot is not None:
        check_writable(plot)
        _draw(request, plot, as_json=as_json)
        return
    if under_torchrun():
        with _probed() as network:
            if network is not None:
                _answer(request, [network], as_json=as_json)
        return
    if check is not None:
        with measuring():
            predicted = check_log(request, Log.load(check))
        show_checks({str(check): [predicted]}, as_json=as_json)
        return
    _answer(request, request.networks(), as_json=as_json)


def _answer(request: Request, networks: list[Network], *, as_json: bool) -> None:
    """Plan for every network, and print the tables."""
    with measuring() as timing:
        planner, candidates = request.planner(networks[0].ranks), request.candidates()
        known, limits = request.known(), request.limits()
        plans = []
        for network in networks:
            for candidate in candidates:
                candidate.validate(planner.measured.shapes, network.ranks)
            rows = planner.rows(candidates, network, known)
            plans.append((network, rows, recommend(rows, network, limits, request.steps)))
    note = request.note()
    if len(plans) > 1:
        show_sizes(plans, timing, note, as_json=as_json)
    elif note is None:
        show_plan(*plans[0][1:], timing, as_json=as_json)
    else:
        network, rows, advice = plans[0]
        show_device_plan(rows, device_terms(planner, rows, network), advice, note, as_json=as_json)


def _draw(request: Request, path: Path, *, as_json: bool) -> None:
    """Plan for every world size and rate, and write the page."""
    try:
        from thinwire.tools.report.plan import render, scale
    except ModuleNotFoundError as error:
        raise UnavailableError(f"the page needs {error.name}: pip install plotly") from error
    networks, candidates = request.networks(), request.candidates()
    with measuring() as timing:
        planner = request.planner(networks[0].ranks)
        for candidate in candidates:
            for network in networks:
                candidate.validate(planner.measured.shapes, network.ranks)
        found = scale(planner, candidates, networks, request.known(), request.limits())
    how = request.note() or str(timing)
    page = render(found, shlex.join(["thinwire", *sys.argv[1:]]), f"{request.words()}. {how}".rstrip("."))
    write_page(path, page, as_json=as_json)


@contextmanager
def _probed() -> Iterator[Network | None]:
    """Yield the network between the ranks of this job on rank 0, and None on the others."""
    with redirect_stdout(sys.stderr):
        dist.init_process_group("gloo")
        if dist.get_world_size() < 2:
            raise OptionError(
                f"WORLD_SIZE={dist.get_world_size()} must be at least 2: one rank sends nothing"
            )
        network = probe_group(dist.group.WORLD)  # type: ignore[arg-type] # there is one
    try:
        yield network if dist.get_rank() == 0 else None
    finally:
        dist.barrier()
        dist.destroy_process_group()
