"""Plans for GPUs that are not at hand: the formula's terms, and that nothing of this machine enters."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import thinwire
from thinwire import OptionError
from thinwire.plan import compute as compute_module
from thinwire.plan import encode as encode_module
from thinwire.plan.candidates import DEFAULTS, PLAIN_DDP, Candidate
from thinwire.plan.compute import assumed, transformer_shapes
from thinwire.plan.devices import DEVICES, KERNELS, OTHERS, DeviceSpeeds, device_named, find_device, work
from thinwire.plan.gaps import Known
from thinwire.plan.network import Link, Network
from thinwire.plan.planner import Planner
from thinwire.plan.text import device_terms
from thinwire.plan.traffic import Layout, traffic
from thinwire.plan.units import parse_rate
from thinwire.tools.bench.parsing import parse_program

H100 = DEVICES["h100"]
SHAPE = torch.Size((1024, 1024))


def layout_of(program: thinwire.Program, count: int = 1) -> Layout:
    names = tuple(str(number) for number in range(count))
    return Layout.of(program, names, dict.fromkeys(names, SHAPE), ())


def planner_on(device: str = "h100", parameters: float = 2e7) -> Planner:
    gpu, shapes = DEVICES[device], transformer_shapes(parameters)
    return Planner(assumed(shapes, gpu.step_seconds(parameters, 8192), device=gpu), speeds=DeviceSpeeds(gpu))


def network(rate: float = 1e10, ranks: int = 8) -> Network:
    return H100.connect(Network(ranks=ranks, link=Link(up=rate, down=rate, latency=1e-4)))


def test_figures_are_those_of_the_data_sheets() -> None:
    figures = {name: (device.memory_rate, device.flops) for name, device in DEVICES.items()}
    assert figures == {
        "a100": (2.039e12, 312e12),
        "h100": (3.35e12, 989e12),
        "l40s": (864e9, 362e12),
        "4090": (1.008e12, 165e12),
    }
    assert all("NVIDIA" in device.source and "https://" in device.source for device in DEVICES.values())


def test_an_unknown_device_lists_the_known_ones() -> None:
    assert find_device("H100") is H100
    assert find_device("RTX 4090").name == "4090"
    with pytest.raises(OptionError, match="device='h900' is not known: choose from a100, h100, l40s, 4090"):
        find_device("h900")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("shadow", None),
    ],
)
def test_the_name_of_torch_finds_the_data_sheet(title: str, name: str | None) -> None:
    found = device_named(title)
    assert (found and found.name) == name


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_quantizer_moves_its_codes_four_times_and_the_gradient_in_sixteen_bytes(ranks: int) -> None:
    layout = layout_of(thinwire.Int8())
    found = work(layout, ranks, 0)
    scatter, gather = (transfer.sent for transfer in traffic(layout, ranks, 0).transfers)
    n = SHAPE.numel()
    assert found.launches == 8
    assert found.moved == (12 * n + scatter, scatter + gather, gather + 4 * n)
    # A code has 8 bits and a scale of 4 bytes for each 256 numbers.
    assert sum(found.moved) == pytest.approx(n * (16 + 4 * (1 + 4 / 256) * (ranks - 1) / ranks), rel=0.01)


def test_launches_grow_with_shapes_where_torch_launches_them_and_not_with_matrices_or_ranks() -> None:
    kernels, program = KERNELS["PowerSGD"], thinwire.PowerSGD(warmup=0)
    counts = [work(layout_of(program, count), 2, 0).launches for count in (1, 3)]
    assert counts == [kernels.bucket + kernels.shape] * 2
    shapes = {"a": SHAPE, "b": torch.Size((2048, 512)), "c": torch.Size((512, 2048)), "d": torch.Size((9,))}
    several = work(Layout.of(program, tuple(shapes), shapes, ()), 2, 0)
    assert several.launches == kernels.bucket + 3 * kernels.shape
    topk = [work(layout_of(thinwire.TopK()), ranks, 0).launches for ranks in (2, 8)]
    assert topk == [KERNELS["TopK"].bucket] * 2
    own = work(layout_of(thinwire.TwoShot(thinwire.Quantize(bits=8))), 2, 0)
    assert own.launches == OTHERS.bucket


def test_encode_is_launches_and_passes_through_memory() -> None:
    layout = layout_of(thinwire.Int4())
    slow = replace(H100, launch_seconds=1e-3)
    both = [sum(DeviceSpeeds(device).seconds(layout, 4, 0)) for device in (H100, slow)]
    launches = KERNELS["Int4"].bucket
    assert both[1] - both[0] == pytest.approx(launches * (1e-3 - 5e-6))
    assert both[0] == pytest.approx(launches * 5e-6 + sum(work(layout, 4, 0).moved) / 3.35e12)
    assert len(DeviceSpeeds(H100).seconds(layout, 4, 0)) == 3


@pytest.mark.parametrize("text", DEFAULTS)
def test_a_step_is_the_sum_of_its_terms(text: str) -> None:
    planner, there = planner_on(), network()
    rows = planner.quick_rows([Candidate.of(text, parse_program(text))], there, Known())
    for row, terms in zip(rows, device_terms(planner, rows, there), strict=True):
        cost = row.cost
        assert cost.step == pytest.approx(cost.compute + terms["delay"] + cost.copies + cost.exposed)
        assert cost.encode == pytest.approx(terms["launch_seconds"] + terms["memory_seconds"])
        assert terms["delay"] <= cost.encode + 1e-12


def test_all_encoding_delays_backward_on_one_device() -> None:
    planner, fast = planner_on(), network(1e15)
    int8 = Candidate.of("Int8", thinwire.Int8())
    there = replace(fast, message_seconds=0.0, link=replace(fast.link, latency=0.0))
    cost = planner.cost(int8, there)
    assert cost.step == pytest.approx(cost.compute + cost.copies + cost.encode, rel=1e-3)


def test_nothing_of_this_machine_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*given: Any) -> Any:
        raise AssertionError("a plan for a device measured something here")

    monkeypatch.setattr(compute_module, "copy_rate", measured)
    monkeypatch.setattr(compute_module, "cores_per_rank", measured)
    monkeypatch.setattr(encode_module, "measure", measured)
    planner, there = planner_on(), network()
    plain, row = planner.rows([Candidate.of("Int8", thinwire.Int8())], there, Known())
    assert row.cost.step < plain.cost.step
    # Collectives run on the device, so Gloo's rates on this kind of host do not bound them.
    sent = plain.cost.bytes
    waits = plain.cost.collectives * 2 * 7 * (1e-4 + H100.launch_seconds)
    assert plain.cost.wire <= 8 * sent / 1e10 + waits + 1e-9


def test_a_faster_memory_and_a_faster_link_never_slow_a_step_down() -> None:
    int8 = Candidate.of("Int8", thinwire.Int8())
    planner = planner_on()
    slow = Planner(planner.measured, speeds=DeviceSpeeds(replace(H100, memory_rate=1e11)))
    assert planner.cost(int8, network()).step < slow.cost(int8, network()).step
    for candidate in (int8, PLAIN_DDP):
        steps = [planner.cost(candidate, network(rate)).step for rate in (1e9, 1e10, 2e11)]
        assert steps == sorted(steps, reverse=True)


def test_rates_in_bytes_have_a_capital_b() -> None:
    assert parse_rate("25GB/s") == parse_rate("200gbit")
    for text in ("25Gb/s", "25GB", "GB/s", "25 furlongs/s"):
        with pytest.raises(OptionError, match="does not parse"):
            parse_rate(text)
