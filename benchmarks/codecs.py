"""Speed of encoding and decoding on one core, compared with torch's per-tensor and per-channel code.

    .venv/bin/python benchmarks/codecs.py             # every codec, GB/s of float32 in and out
    .venv/bin/python benchmarks/codecs.py --native    # native code against the pure-torch path, and memcpy
    .venv/bin/python benchmarks/codecs.py --kernels   # int8 in four forms: whole, in chunks, compiled, native

Rounds are interleaved and figures are medians of the thread's CPU time, which other processes disturb least.
torch's code is what its quantization hooks run for one rank's gradients: the observer, the quantiser and the
dequantiser.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

from thinwire import (
    BlockCodec,
    Cast,
    Codec,
    Float8,
    LargestEntries,
    Quantize,
    RandomEntries,
    SignBits,
    TwoMagnitudes,
)
from thinwire.kernels import blocks, library

PER_TENSOR, PER_CHANNEL = "torch per tensor", "torch per channel"
CODECS: dict[str, Codec] = {
    "bf16": Cast(torch.bfloat16),
    "int8": Quantize(bits=8),
    "int8 affine": Quantize(bits=8, affine=True),
    "int8 stochastic": Quantize(bits=8, stochastic=True),
    "int4": Quantize(bits=4, block=64),
    "int2": TwoMagnitudes(),
    "fp8 e4m3": Float8(variant="e4m3"),
    "fp8 e5m2": Float8(variant="e5m2"),
    "sign": SignBits(block=128),
    "top-k 1 %": LargestEntries(ratio=0.01),
    "top-k 1/64, 2 bits": LargestEntries(ratio=1 / 64, block=4096, values="int2"),
    "random-k 10 %": RandomEntries(ratio=0.1),
}
MEMCPY = "memcpy, twice"
AIMS = {"int8": 3.0, "int4": 3.0, "int2": 3.0}
"""GB/s of float32 that encode and decode together should reach on one core."""
Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]
"""A function that encodes, and one that decodes its result."""


def per_tensor(x: torch.Tensor) -> Any:
    """Encode as quantization_pertensor_hook does."""
    observer = torch.ao.quantization.MinMaxObserver()
    observer(x)
    scale, zero = observer.calculate_qparams()
    return theirs._quantize_per_tensor_backend(x, scale, zero), scale, zero


def per_channel(x: torch.Tensor) -> Any:
    """Encode as quantization_perchannel_hook does."""
    channels = torch.nn.functional.pad(x, (0, 512 - len(x) % 512)).view(-1, 512)
    observer = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(channels)
    scale, zero = observer.calculate_qparams()
    return theirs._quantize_per_channel_backend(channels, scale, zero), scale, zero


def of_codec(codec: Codec, into: torch.Tensor) -> Pair:
    """Return a codec's functions. It decodes into an existing tensor, as programs do."""
    return codec.encode, lambda parts: codec.decode(parts, into)


def without(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on the pure-torch path."""
    with library.switched_off():
        return function(*args)


def race(pairs: dict[str, Pair], x: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of encoding and decoding, by name."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for number in range(rounds + 1):
        for name, (encode, decode) in pairs.items():
            if number > 3 and name == PER_CHANNEL:
                continue  # three rounds of it take longer than all rounds of the others
            started = time.thread_time()
            encoded = encode(x)
            between = time.thread_time()
            decode(encoded)
            seconds[name].append((between - started, time.thread_time() - between))
    return {
        name: (statistics.median(e for e, _ in own[1:]), statistics.median(d for _, d in own[1:]))
        for name, own in seconds.items()
    }


def show(found: dict[str, tuple[float, float]], x: torch.Tensor, rivals: list[str]) -> None:
    """Print GB/s of each, and the speed-up of encode and decode together over the rivals."""
    size = x.numel() * x.element_size() / 1e9
    heads = f"{'encode':>10}{'decode':>10}{'both':>10}"
    print(f"{'':<18}{heads}" + "".join(f"{f'x {rival}':>22}" for rival in rivals))
    for name, (encode, decode) in found.items():
        ratios = [sum(found[rival]) / (encode + decode) for rival in rivals]
        print(
            f"{name:<18}"
            + "".join(f"{size / seconds:>5.2f} GB/s" for seconds in (encode, decode, encode + decode))
            + "".join(f"{ratio:>22.2f}" for ratio in ratios)
        )


def native(x: torch.Tensor, rounds: int) -> None:
    """Compare each codec's native code with its pure-torch path, with one figure for encode and decode."""
    if not library.status().in_use:
        raise SystemExit(f"native code is not in use: {library.status().detail}")
    size, into = x.numel() * x.element_size() / 1e9, torch.empty_like(x)
    pairs: dict[str, Pair] = {"memcpy": (into.copy_, lambda parts: None)}
    for name in ("int8", "int4", "int2", "fp8 e4m3", "fp8 e5m2", "sign", "top-k 1 %"):
        encode, decode = of_codec(CODECS[name], into)
        pairs[name] = encode, decode
        pairs[f"{name}, torch"] = partial(without, encode), partial(without, decode)
    found = race(pairs, x, rounds)
    print(f"memcpy: {size / found['memcpy'][0]:.1f} GB/s")
    print(f"{'GB/s of float32':<18}{'encode':>9}{'decode':>9}{'together':>10}{'on torch':>10}{'ratio':>8}")
    for name in (name for name in found if f"{name}, torch" in found):
        (encoding, decoding), slow = found[name], sum(found[f"{name}, torch"])
        both = encoding + decoding
        print(
            f"{name:<18}{size / encoding:>9.2f}{size / decoding:>9.2f}{size / both:>10.2f}"
            f"{size / slow:>10.2f}{slow / both:>8.1f}"
        )
    fused(x, rounds)


def fused(x: torch.Tensor, rounds: int) -> None:
    """Print the speed of error feedback, encoding and residual in one pass, and of `mean_encode`."""
    size, residual, error = x.numel() * x.element_size() / 1e9, torch.zeros_like(x), torch.empty_like(x)
    print(f"{'GB/s of float32':<18}{'feedback + encode + residual':>32}{'mean of 2 + encode + residual':>32}")
    for name in ("int8", "int4", "sign"):
        codec = CODECS[name]
        assert isinstance(codec, BlockCodec)
        assert codec.kernel is not None
        kind, block, parts = codec.kernel, codec.block, codec.encode(x)
        into = [torch.empty_like(part) for part in parts]

        def feed_back(kind: str = kind, block: int = block, into: list[torch.Tensor] = into) -> None:
            blocks.encode(kind, block, [x], [residual], 1.0, [error], into[0], into[1])

        def average(
            kind: str = kind,
            block: int = block,
            into: list[torch.Tensor] = into,
            parts: tuple[torch.Tensor, ...] = parts,
        ) -> None:
            received = [(parts[0], parts[1])]
            blocks.mean_encode(kind, block, [x], [residual], 1.0, received, 0, [error], into[0], into[1])

        pair: dict[str, Pair] = {"": (lambda _, f=feed_back: f(), lambda _, f=average: f())}  # type: ignore[misc]
        first, second = race(pair, x, rounds)[""]
        print(f"{name:<18}{size / first:>32.2f}{size / second:>32.2f}")


def show_aims(found: dict[str, tuple[float, float]], x: torch.Tensor) -> None:
    """Print the aims and the measured figures."""
    for name, least in AIMS.items():
        speed = x.numel() * x.element_size() / 1e9 / sum(found[name])
        outcome = "met" if speed >= least else "not met"
        print(f"  {name}: encode and decode at least {least:g} GB/s: {speed:.2f}  {outcome}")


def whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode int8 with each operation over all numbers."""
    blocks = x.view(-1, 256)
    most = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    inverse = torch.where(most > 1e-35, 127 / most, 0.0)
    return most / 127, (blocks * inverse).round().to(torch.int8)


def back(parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Decode the result of `whole`."""
    scale, codes = parts
    return (codes * scale).view(-1)


def kernels(x: torch.Tensor, rounds: int) -> None:
    """Compare the same formula in four forms."""
    started = time.perf_counter()
    encode, decode = torch.compile(whole, dynamic=True), torch.compile(back, dynamic=True)
    decode(encode(x))
    print(
        f"compiling takes {time.perf_counter() - started:.1f} s, and needs a C++ compiler where training runs"
    )
    in_chunks, from_chunks = of_codec(Quantize(bits=8), torch.empty_like(x))
    pairs: dict[str, Pair] = {
        "whole": (whole, back),
        "in chunks": (partial(without, in_chunks), partial(without, from_chunks)),
        "compiled": (encode, decode),
        "native": (in_chunks, from_chunks),
    }
    show(race(pairs, x, rounds), x, ["whole"])


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--numbers", type=int, default=25 * 2**20 // 4, help="default: one bucket of DDP")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's observers are deprecated
    x = torch.randn(options.numbers // 256 * 256, generator=torch.Generator().manual_seed(0))
    print(f"{x.numel()} float32 numbers, one thread, median of {options.rounds} interleaved rounds")
    if options.kernels or options.native:
        (kernels if options.kernels else native)(x, options.rounds)
        return
    pairs: dict[str, Pair] = {
        PER_TENSOR: (per_tensor, lambda parts: theirs._dequantize_per_tensor_backend(*parts)),
        PER_CHANNEL: (per_channel, lambda parts: theirs._dequantize_per_channel_backend(*parts)),
    }
    pairs |= {name: of_codec(codec, torch.empty_like(x)) for name, codec in CODECS.items()}
    pairs[MEMCPY] = (torch.empty_like(x).copy_, torch.empty_like(x).copy_)
    found = race(pairs, x, options.rounds)
    show(found, x, [PER_TENSOR, PER_CHANNEL])
    show_aims(found, x)


if __name__ == "__main__":
    main()
