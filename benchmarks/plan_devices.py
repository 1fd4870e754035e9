"""Predicted steps on GPUs that are not at hand, from data sheets. Nothing is measured.

    .venv/bin/python benchmarks/plan_devices.py            # the predictions, with their terms
    .venv/bin/python benchmarks/plan_devices.py --count    # launches and bytes of plain torch operators

The second command runs programs on fake CUDA tensors (tests/fake_cuda), which have no values. It is the
source of `KERNELS` in src/thinwire/plan/devices.py for programs without fused kernels. Bytes are those of all
tensors that an operator reads and writes, by stage and number, messages included.
"""

import argparse
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import thinwire
from tests.fake_cuda import test_programs
from tests.fake_cuda.device import FakeCuda, fake_cuda, unavailable
from thinwire.plan.candidates import Candidate
from thinwire.plan.compute import assumed, transformer_shapes
from thinwire.plan.devices import DEVICES, LAUNCH_SECONDS, TOKENS, UTILISATION, Device, DeviceSpeeds
from thinwire.plan.gaps import Known
from thinwire.plan.network import FRAMING, Link, Network
from thinwire.plan.planner import Planner
from thinwire.plan.text import device_terms
from thinwire.plan.units import show_seconds

MODELS = {"GPT-2 small": 124e6, "A larger one": 1.3e9}
NETWORKS = {
    "8 GPUs over PCIe 4.0, 25 GB/s": (8, 2e11, 1e-5),
    "2 nodes of 1 GPU, 10 Gbit/s": (2, FRAMING * 1e10, 1e-4),
    "2 nodes of 1 GPU, 25 Gbit/s": (2, FRAMING * 2.5e10, 1e-4),
}
"""Ranks, bits of data per second, and the round trip, by name."""
BASE = "DDP bf16"
PROGRAMS = {
    BASE: thinwire.BF16(),
    "Int8": thinwire.Int8(),
    "FP8": thinwire.FP8(),
    "PowerSGD": thinwire.PowerSGD(rank=4, factor_dtype="bf16", warmup=0),
}
COUNTED = (
    thinwire.Exact(),
    thinwire.BF16(),
    thinwire.Int8(),
    thinwire.TopK(),
    thinwire.PowerSGD(rank=4, factor_dtype="bf16", warmup=0),
    thinwire.PowerSGD(rank=8, factor_dtype="int8", warmup=0),
)
MATRICES = ((1024, 4096), (4096, 1024), (1024, 1024), (3072, 1024))
"""The matrices of a transformer's layer."""
WRITE_ONLY = ("copy_", "fill_", "zero_", "normal_", "_foreach_copy_", "_foreach_zero_")
"""Operators in place that do not read their target."""


def predict(device: Device, parameters: float, network: Network) -> None:
    """Print one line for each program."""
    seconds = device.step_seconds(parameters, TOKENS)
    planner = Planner(
        assumed(transformer_shapes(parameters), seconds, device=device), speeds=DeviceSpeeds(device)
    )
    candidates = [Candidate(name, program) for name, program in PROGRAMS.items()]
    there = device.connect(network)
    rows = planner.quick_rows(candidates, there, Known())
    for row, terms in list(zip(rows, device_terms(planner, rows, there), strict=True))[1:]:
        cost = row.cost
        times = (cost.step, cost.compute, terms["delay"], cost.copies, cost.exposed)
        parts = (terms["launch_seconds"], terms["memory_seconds"], cost.wire)
        print(
            f"  {device.name:<6}{row.candidate.text:<10}"
            + "".join(f"{show_seconds(value):>9}" for value in (*times, *parts))
            + f"{terms['launches']:>9,.0f}{terms['memory_bytes'] / 1e9:>9.2f}{cost.bytes / 1e9:>9.3f}"
            + f"{terms['speed_up_bf16']:>9.2f} x"
        )


def predictions() -> None:
    """Print the formula, its figures, and the predictions of all cells."""
    print("Predicted from data sheets, not measured: run `thinwire doctor --accelerator` on the device.\n")
    print("step    = compute + delay + copies + exposed         delay: encoding during backward")
    print(f"compute = 6 x parameters x {TOKENS} tokens / ({UTILISATION:.0%} of bf16 operations)")
    print(f"encode  = launches x {1e6 * LAUNCH_SECONDS:g} us + bytes in memory / memory rate")
    print("link    = bytes sent / rate + rounds x (latency + one launch)\n")
    for device in DEVICES.values():
        rates = f"{device.memory_rate / 1e9:g} GB/s, {device.flops / 1e12:g} TFLOPS"
        print(f"{device.name:<6}{device.title}, {rates}: {device.source}")
    columns = ("step", "compute", "delay", "copies", "exposed", "launch", "memory", "link")
    for model, parameters in MODELS.items():
        for name, (ranks, rate, trip) in NETWORKS.items():
            network = Network(ranks=ranks, link=Link(up=rate, down=rate, latency=trip / 2))
            print(f"\n{model}, {parameters / 1e6:,.0f} M parameters, {name}, round trip {1e6 * trip:g} us")
            print(
                f"  {'':<16}{''.join(f'{column:>9}' for column in columns)}{'launches':>9}{'GB moved':>9}"
                f"{'GB sent':>9}{'over bf16':>11}"
            )
            for device in DEVICES.values():
                predict(device, parameters, network)


class Counting(FakeCuda):
    """Fake CUDA that also counts the bytes which operators read and write, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []
        latest[0] = self

    def __enter__(self) -> Any:
        self.moved.append(0)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.launches
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.launches > before:
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            own = {id(tensor) for tensor in taken}
            # A target that is only written was counted among the arguments.
            name = func.overloadpacket.__name__
            only_written = "out" in (kwargs or {}) or name in WRITE_ONLY
            written = [tensor for tensor in made if not (only_written and id(tensor) in own)]
            # Operators on lists, in place, return nothing.
            if name.startswith("_foreach") and not made and not only_written:
                written = list(args[0])
            self.moved[-1] += sum(tensor.nbytes for tensor in (*taken, *written))
        return result


latest: dict[int, Counting] = {}
"""The count of the last bucket, under 0."""


def counts() -> None:
    """Print launches and bytes per number of each program, for one matrix and for a layer's four."""
    if reason := unavailable():
        raise SystemExit(reason)
    vars(test_programs)["FakeCuda"] = Counting  # the mode that `Run` enters for each stage
    for program in COUNTED:
        for shapes in (MATRICES[:1], MATRICES):
            numbers = sum(rows * columns for rows, columns in shapes)
            for ranks in (2, 8):
                named = {str(place): shape for place, shape in enumerate(shapes)}
                with fake_cuda():
                    run = test_programs.Run(program, ranks, shapes=named)
                    for _ in range(2):  # the first step also makes residuals
                        run.run()
                moved = ", ".join(f"{nbytes / numbers:.1f}" for nbytes in latest[0].moved)
                print(
                    f"{program!r:<56}matrices {len(shapes)}, ranks {ranks}:{run.launches:>6} launches,"
                    f" {moved} bytes per number"
                )


def main() -> None:
    """Print predictions, or counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true", help="count launches and bytes on fake CUDA tensors")
    counts() if parser.parse_args().count else predictions()


if __name__ == "__main__":
    main()
