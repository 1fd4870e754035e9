"""Native code and the pure-torch path give the same bits, for every encoding, length, block and value."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import BlockCodec, Float8, LargestEntries, OptionError, Quantize, SignBits, TwoMagnitudes
from thinwire.codecs.rounding import sum_pairs
from thinwire.codecs.topk import largest
from thinwire.kernels import blocks, library, packing

pytestmark = pytest.mark.skipif(library.native() is None, reason=library.status().detail)

CODECS: dict[str, Callable[[int], BlockCodec]] = {
    "int8": lambda block: Quantize(bits=8, block=block),
    "int4": lambda block: Quantize(bits=4, block=block),
    "sign": lambda block: SignBits(block=block),
    "e4m3": lambda block: Float8(variant="e4m3", block=block),
    "e5m2": lambda block: Float8(variant="e5m2", block=block),
    "int2": lambda block: TwoMagnitudes(block=block),
}
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -3e-42,
    1.2e-38,
    9e-34,
    1.1e-33,
    -2e-30,
    1.0,
    -1.0,
    127.5,
    3.4e38,
    -3.4e38,
    1.7e38,
]
NON_FINITE = [float("inf"), float("-inf"), float("nan")]

kinds = st.sampled_from(list(CODECS))
widths = st.sampled_from([8, 16, 24, 64, 256, 1000])


@st.composite
def pieces(draw: st.DrawFn, *, finite: bool = False, lengths: list[int] | None = None) -> list[torch.Tensor]:
    """Random numbers of random magnitudes, with special values here and there."""
    sizes = lengths if lengths is not None else draw(st.lists(st.integers(0, 700), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    specials = draw(st.lists(st.sampled_from(SPECIAL if finite else SPECIAL + NON_FINITE), max_size=6))
    made = []
    for size in sizes:
        x = torch.randn(size, generator=generator) * 10.0 ** draw(st.integers(-40, 37))
        if size:
            for value in specials:
                x[int(torch.randint(size, (), generator=generator))] = value
        made.append(x)
    return made


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether both hold the same bits. All NaNs count as one."""
    if left.dtype != torch.float32:
        return torch.equal(left, right)
    return bool(((left.view(torch.int32) == right.view(torch.int32)) | (left.isnan() & right.isnan())).all())


def room(kind: str, width: int, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    count = sum(-(-len(x) // width) for x in pieces)
    return torch.empty(count, 1), torch.empty(count, width * blocks.bits_of(kind) // 8, dtype=torch.uint8)


def by_torch(codec: BlockCodec, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return scales, codes and decoded numbers of each piece encoded by itself on the pure-torch path."""
    scales, codes, decoded = [], [], []
    with library.switched_off():
        for x in pieces:
            # A piece shorter than a block would be one narrower block: append a block, and drop it again.
            longer = torch.cat([x, torch.zeros(-len(x) % codec.block), torch.ones(codec.block)])
            if codec.kernel == "sign":  # the magnitude of a short block is the mean of its own numbers
                longer = torch.cat([torch.ones(codec.block), x])
            cut = slice(1, None) if codec.kernel == "sign" else slice(0, -1)
            own = codec.encode(longer)
            numbers = codec.decode(own, torch.empty_like(longer)).view(-1)
            scales.append(own[0][cut])
            codes.append(own[1][cut].view(torch.uint8))
            decoded.append(numbers[codec.block :] if codec.kernel == "sign" else numbers[: len(x)])
    return [torch.cat(scales), torch.cat(codes), torch.cat(decoded)]


@given(kinds, widths, pieces(), st.data(), st.sampled_from([1.0, 0.9, 0.1]), st.booleans(), st.booleans())
def test_encoding_with_error_feedback(
    kind: str,
    width: int,
    values: list[torch.Tensor],
    data: st.DataObject,
    keep: float,
    fed_back: bool,
    in_place: bool,
) -> None:
    residuals = data.draw(pieces(lengths=[len(x) for x in values])) if fed_back else None
    fed = [v + r * keep for v, r in zip(values, residuals, strict=True)] if residuals else values
    scales, codes, decoded = by_torch(CODECS[kind](width), fed)
    own_scales, own_codes = room(kind, width, values)
    targets = [x.clone() for x in values]
    errors = targets if in_place else [torch.empty_like(x) for x in values]
    blocks.encode(kind, width, targets, residuals, keep, errors, own_scales, own_codes)
    assert same(own_scales, scales)
    finite = scales.isfinite().flatten()
    assert same(own_codes[finite], codes[finite])
    if kind.startswith("int"):
        assert same(own_codes, codes)
    read = [torch.empty_like(x) for x in values]
    blocks.decode(kind, width, own_scales, own_codes, read)
    assert same(torch.cat(read).nan_to_num(7, 7, 7), decoded.nan_to_num(7, 7, 7))
    assert same(torch.cat(errors), torch.cat(fed) - torch.cat(read))
    again = [torch.empty_like(one) for one in (own_scales, own_codes)]
    blocks.encode(kind, width, values, residuals, keep, None, *again)
    assert same(again[0], own_scales)
    assert same(again[1], own_codes)


@given(kinds, widths, st.integers(0, 700), st.data(), st.integers(2, 9), st.booleans())
def test_the_middle_of_a_two_shot(
    kind: str, width: int, length: int, data: st.DataObject, world: int, fed_back: bool
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    own = data.draw(pieces(lengths=[length, 5]))
    residuals = data.draw(pieces(lengths=[length, 5])) if fed_back else None
    received, terms = [], []
    for number in range(world):
        if number == rank:
            fed = [v + r * 0.5 for v, r in zip(own, residuals, strict=True)] if residuals else own
            terms.append(torch.cat(fed))
            continue
        others = data.draw(pieces(finite=True, lengths=[length, 5]))
        scales, codes, decoded = by_torch(CODECS[kind](width), others)
        received.append((scales, codes))
        terms.append(decoded)
    mean = [x / world for x in sum_pairs(torch.stack(terms)).split([length, 5])]
    scales, codes, decoded = by_torch(CODECS[kind](width), mean)
    own_scales, own_codes = room(kind, width, own)
    blocks.mean_encode(kind, width, own, residuals, 0.5, received, rank, own, own_scales, own_codes)
    finite = scales.isfinite().flatten()
    assert same(own_scales, scales)
    assert same(own_codes[finite], codes[finite])
    expected = (torch.cat(mean) - decoded) * world
    comparable = expected.isfinite()
    assert same(torch.cat(own)[comparable], expected[comparable])


@given(kinds, widths, pieces(), st.sampled_from([1.0, -1.0, 0.3, 1 / 3]))
def test_codecs_decode_and_add_the_same_numbers_either_way(
    kind: str, width: int, several: list[torch.Tensor], weight: float
) -> None:
    codec = CODECS[kind](width)
    for x in several:
        parts = codec.encode(x)
        with library.switched_off():
            other = codec.encode(x)
        assert [(one.shape, one.dtype) for one in parts] == [(one.shape, one.dtype) for one in other]
        assert same(parts[0], other[0])
        finite = parts[0].isfinite().flatten()
        assert same(parts[1][finite], other[1][finite])
        start = torch.linspace(-3, 3, len(x))
        found, added = codec.decode(parts, torch.empty_like(x)), start.clone()
        codec.add(parts, added, weight)
        with library.switched_off():
            assert same(codec.decode(parts, torch.empty_like(x)), found)
            expected = start.clone()
            codec.add(parts, expected, weight)
        assert same(added, expected)


@pytest.mark.parametrize("variant", ["e4m3", "e5m2"])
def test_every_float8_code_decodes_to_the_same_number(variant: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None]
    codec = CODECS[variant](256)
    for scale in (1.0, 0.3, 1e-40, 7e35):
        parts = (torch.tensor([[scale]]), codes)
        found = codec.decode(parts, torch.empty(256))
        with library.switched_off():
            assert same(codec.decode(parts, torch.empty(256)), found)


@given(st.lists(st.sampled_from([*SPECIAL, *NON_FINITE, 2.0, 2.5, -2.0]), min_size=1, max_size=60), st.data())
def test_the_largest_are_the_same_with_ties_and_special_values(
    values: list[float], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, len(values)))
    x = torch.tensor([values, values[::-1]])
    found = packing.largest(x, kept)
    assert torch.equal(found, largest(x, kept))
    for row, places in zip(x.abs().nan_to_num(nan=torch.inf), found, strict=True):
        assert torch.equal(places, places.sort().values)
        by_size = sorted(range(len(values)), key=lambda place, row=row: (-float(row[place]), place))  # type: ignore[misc]
        assert torch.equal(row[places].sort().values, row[by_size[:kept]].sort().values)


@pytest.mark.parametrize("codec", [LargestEntries(ratio=0.03), LargestEntries(ratio=0.2, block=100)], ids=str)
def test_top_k_encodings_are_the_same(codec: LargestEntries) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).mul_(4).round_()
    found = codec.encode(x)
    with library.switched_off():
        assert all(map(same, found, codec.encode(x)))


@given(pieces())
def test_finiteness(several: list[torch.Tensor]) -> None:
    for x in several:
        flag = blocks.finite(x)
        assert flag.dtype == torch.bool
        assert flag.shape == ()
        assert bool(flag) == bool(x.isfinite().all())


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.bfloat16), torch.ones(4, 4).T[:2], torch.ones(0)])
def test_finiteness_of_tensors_that_native_code_does_not_take(x: torch.Tensor) -> None:
    assert blocks.finite(x)


def test_native_code_is_not_called_with_memory_that_does_not_fit() -> None:
    x, scales, codes = torch.ones(100), torch.empty(2), torch.empty(128, dtype=torch.uint8)
    with pytest.raises(OptionError, match="do not fit 2 blocks of 64 int8 numbers"):
        blocks.encode("int8", 64, [x], None, 1.0, None, scales, codes[:-1])
    with pytest.raises(OptionError, match="do not fit"):
        blocks.decode("int8", 64, scales.double(), codes, [x])
    with pytest.raises(OptionError, match=r"errors have .* numbers and values"):
        blocks.encode("int8", 64, [x], None, 1.0, [x[:5]], scales, codes)
    with pytest.raises(OptionError, match=r"residuals .* cannot be passed to native code"):
        blocks.encode("int8", 64, [x], [x.double()], 1.0, None, scales, codes)
    with pytest.raises(OptionError, match=r"block=3 must .* fill whole bytes"):
        blocks.encode("int4", 3, [x], None, 1.0, None, scales, codes)
    with library.switched_off(), pytest.raises(OptionError, match="call `supported` first"):
        blocks.encode("int8", 64, [x], None, 1.0, None, scales, codes)
    assert not blocks.supported("int3", [x])
    assert not blocks.supported("int8", [x.view(10, 10).T])
    assert not blocks.supported("int8", [torch.ones(3, device="meta")])


def test_the_environment_switches_native_code_off() -> None:
    program = "from thinwire.kernels import library; print(library.status().detail)"
    command = [sys.executable, "-c", program]
    said = subprocess.run(
        command, env=os.environ | {"THINWIRE_KERNELS": "0"}, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "switched off by THINWIRE_KERNELS=0"
