"""How fast codecs encode and decode on one core, against torch's per-tensor and per-channel code.

    .venv/bin/python benchmarks/codecs.py             # every codec, GB/s of float32 in and out
    .venv/bin/python benchmarks/codecs.py --kernels   # int8 three ways: whole, by the cache-full, compiled

Rounds are interleaved; figures are medians. torch's code is what its quantization hooks run for one rank's
gradients: the observer, the quantiser and the dequantiser.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

from thinwire import Cast, Codec, Float8, LargestEntries, Quantize, RandomEntries, SignBits

PER_TENSOR, PER_CHANNEL = "torch per tensor", "torch per channel"
CODECS: dict[str, Codec] = {
    "bf16": Cast(torch.bfloat16),
    "int8": Quantize(bits=8),
    "int8 affine": Quantize(bits=8, affine=True),
    "int8 stochastic": Quantize(bits=8, stochastic=True),
    "int4": Quantize(bits=4, block=64),
    "fp8 e4m3": Float8(variant="e4m3"),
    "fp8 e5m2": Float8(variant="e5m2"),
    "sign": SignBits(block=128),
    "top-k 1 %": LargestEntries(ratio=0.01),
    "random-k 10 %": RandomEntries(ratio=0.1),
}
Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]
"""Encode, and decode what it made."""


def per_tensor(x: torch.Tensor) -> Any:
    """As quantization_pertensor_hook does it."""
    observer = torch.ao.quantization.MinMaxObserver()
    observer(x)
    scale, zero = observer.calculate_qparams()
    return theirs._quantize_per_tensor_backend(x, scale, zero), scale, zero


def per_channel(x: torch.Tensor) -> Any:
    """As quantization_perchannel_hook does it."""
    channels = torch.nn.functional.pad(x, (0, 512 - len(x) % 512)).view(-1, 512)
    observer = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(channels)
    scale, zero = observer.calculate_qparams()
    return theirs._quantize_per_channel_backend(channels, scale, zero), scale, zero


def of_codec(codec: Codec, room: torch.Tensor) -> Pair:
    """A codec, decoding into room that is there already, as programs do."""
    return codec.encode, lambda parts: codec.decode(parts, room)


def race(pairs: dict[str, Pair], x: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of encoding and decoding."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for number in range(rounds + 1):
        for name, (encode, decode) in pairs.items():
            if number > 3 and name == PER_CHANNEL:
                continue  # three rounds of it take longer than all others together
            started = time.perf_counter()
            encoded = encode(x)
            between = time.perf_counter()
            decode(encoded)
            seconds[name].append((between - started, time.perf_counter() - between))
    return {
        name: (statistics.median(e for e, _ in own[1:]), statistics.median(d for _, d in own[1:]))
        for name, own in seconds.items()
    }


def show(found: dict[str, tuple[float, float]], x: torch.Tensor, rivals: list[str]) -> None:
    """A line for each; of the rivals, how many times as fast encode and decode together are."""
    size = x.numel() * x.element_size() / 1e9
    print(f"{'':<18}{'encode':>10}{'decode':>10}" + "".join(f"{f'x {rival}':>22}" for rival in rivals))
    for name, (encode, decode) in found.items():
        ratios = [sum(found[rival]) / (encode + decode) for rival in rivals]
        print(
            f"{name:<18}{size / encode:>5.2f} GB/s{size / decode:>5.2f} GB/s"
            + "".join(f"{ratio:>22.2f}" for ratio in ratios)
        )


def whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of int8, each operation over all numbers."""
    blocks = x.view(-1, 256)
    most = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    inverse = torch.where(most > 1e-35, 127 / most, 0.0)
    return most / 127, (blocks * inverse).round().to(torch.int8)


def back(parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The inverse."""
    scale, codes = parts
    return (codes * scale).view(-1)


def kernels(x: torch.Tensor, rounds: int) -> None:
    """The same formula in three forms."""
    started = time.perf_counter()
    encode, decode = torch.compile(whole, dynamic=True), torch.compile(back, dynamic=True)
    decode(encode(x))
    print(
        f"compiling takes {time.perf_counter() - started:.1f} s, and needs a C++ compiler where training runs"
    )
    pairs: dict[str, Pair] = {
        "whole": (whole, back),
        "by the cache-full": of_codec(Quantize(bits=8), torch.empty_like(x)),
        "compiled": (encode, decode),
    }
    show(race(pairs, x, rounds), x, ["whole"])


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--numbers", type=int, default=25 * 2**20 // 4, help="default: a bucket of DDP's")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's observers say that they are old
    x = torch.randn(options.numbers // 256 * 256, generator=torch.Generator().manual_seed(0))
    print(f"{x.numel()} float32 numbers, one thread, median of {options.rounds} interleaved rounds")
    if options.kernels:
        kernels(x, options.rounds)
        return
    pairs: dict[str, Pair] = {
        PER_TENSOR: (per_tensor, lambda parts: theirs._dequantize_per_tensor_backend(*parts)),
        PER_CHANNEL: (per_channel, lambda parts: theirs._dequantize_per_channel_backend(*parts)),
    }
    pairs |= {name: of_codec(codec, torch.empty_like(x)) for name, codec in CODECS.items()}
    show(race(pairs, x, options.rounds), x, [PER_TENSOR, PER_CHANNEL])


if __name__ == "__main__":
    main()
