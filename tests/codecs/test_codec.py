"""Every codec against the shared battery, and what each promises on top of it."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import (
    Cast,
    Codec,
    Float8,
    LargestEntries,
    OptionError,
    Quantize,
    RandomEntries,
    SignBits,
    TwoMagnitudes,
)
from thinwire.codecs.codec import BlockCodec, Parts, reseeded
from thinwire.codecs.float8 import Variant
from thinwire.testing import check_codec

CODECS: list[Codec] = [
    Cast(torch.bfloat16),
    Cast(torch.float16),
    Quantize(bits=8),
    Quantize(bits=8, block=1),
    Quantize(bits=8, block=100, affine=True),
    Quantize(bits=8, stochastic=True),
    Quantize(bits=4),
    Quantize(bits=4, block=64, affine=True),
    Quantize(bits=4, affine=True, stochastic=True),
    Float8(variant="e4m3"),
    Float8(variant="e5m2", block=32),
    SignBits(),
    SignBits(block=8),
    TwoMagnitudes(),
    TwoMagnitudes(block=4),
    LargestEntries(),
    LargestEntries(ratio=0.05, block=100, values="fp32"),
    LargestEntries(ratio=64 / 4096, block=4096, values="int2"),
    LargestEntries(ratio=0.05, block=100, values="int4"),
    LargestEntries(ratio=1.0, block=64, values="int8"),
    RandomEntries(ratio=0.1),
    RandomEntries(ratio=0.01),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_codec_passes_the_battery(codec: Codec) -> None:
    check_codec(codec)


@dataclass(frozen=True)
class Broken(BlockCodec):
    """A codec with one defect."""

    defect: str
    block: int = 16

    @property
    def wire_bits(self) -> float:
        return 8.0 if self.defect == "bytes" else 32.0

    def encode_blocks(self, x: torch.Tensor) -> Parts:
        if self.defect == "hides overflow":
            x = x.nan_to_num(posinf=1.0, neginf=1.0)
        if self.defect == "clips":
            x = torch.where(x.isfinite(), x.clamp(-0.5, 0.5), x)
        if self.defect == "form":
            return (x[:, : 8 if x.any() else 4].clone(),)
        if self.defect == "empty":
            x = x / x.abs().max()
        if self.defect == "narrow":
            return (x.view(-1, self.block).clone(),)
        return (x.clone(),)

    def decode_blocks(self, parts: Parts, out: torch.Tensor) -> None:
        out.zero_()[:, : parts[0].shape[1]].copy_(parts[0])
        if self.defect == "zeros":
            out.add_(1)


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("bytes", "declares wire_bits=8.0 and uses 32.0 bits"),
        ("hides overflow", "hides inf at index 0"),
        ("clips", "with feedback: .* numbers are off by"),
        ("zeros", "decodes 1 zeros to other values"),
        ("form", "in different forms"),
        ("empty", r"encode of 0 numbers \(shape \(0,\), .*float32\) raised .* blocks have shape \(0, 8\)"),
        ("narrow", r"decode of 0 numbers .* raised .* blocks have shape \(0, 8\), with block=16"),
    ],
)
def test_the_battery_finds_defects(defect: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_codec(Broken(defect))


def test_the_battery_passes_a_codec_without_defects() -> None:
    check_codec(Broken("none"))


numbers = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=70).map(torch.tensor)


def back(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x), torch.empty_like(x))


def blocks(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(x.split(size)) if x.numel() else []


@given(numbers, st.sampled_from([4, 8]), st.booleans(), st.booleans())
def test_quantised_numbers_are_within_a_step(
    x: torch.Tensor, bits: int, affine: bool, stochastic: bool
) -> None:
    codec = Quantize(bits=bits, block=16, affine=affine, stochastic=stochastic)
    for block, found in zip(blocks(x, 16), blocks(back(codec, x), 16), strict=True):
        levels = 2**bits - 1 if affine else 2 ** (bits - 1) - 1
        # The last block is padded with zeros, which belong to its range.
        low, high = min(float(block.min()), 0.0), max(float(block.max()), 0.0)
        step = (high - low if affine else float(block.abs().max())) / levels
        allowed = step * (1.0 if stochastic else 0.5) * (1 + 1e-4) + 1.01e-33 + 1e-6 * max(high, -low)
        assert ((block - found).abs() <= allowed).all()


@given(numbers, st.sampled_from(["e4m3", "e5m2"]))
def test_float8_is_within_its_mantissa(x: torch.Tensor, variant: Variant) -> None:
    found = back(Float8(variant=variant, block=16), x)
    share, smallest = (1 / 16, 2**-10 / 448) if variant == "e4m3" else (1 / 8, 2**-17 / 57344)
    for block, got in zip(blocks(x, 16), blocks(found, 16), strict=True):
        allowed = torch.maximum(block.abs() * share, block.abs().max() * smallest) * 1.001 + 1.01e-33
        assert ((block - got).abs() <= allowed).all()


@pytest.mark.parametrize("variant", ["e4m3", "e5m2"])
def test_float8_decodes_every_code_as_torch_does(variant: Variant) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[variant]
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    expected = codes.float()
    finite = expected.isfinite()
    out = torch.empty(1, 256)
    Float8(variant=variant).decode_blocks((torch.ones(1, 1), codes.view(torch.uint8)[None]), out)
    assert torch.equal(out[0][finite], expected[finite])


@given(numbers)
def test_signs_keep_signs_and_mean_magnitude(x: torch.Tensor) -> None:
    found = back(SignBits(block=8), x)
    for block, got in zip(x[: x.numel() // 8 * 8].split(8), found.split(8), strict=False):
        if block.numel() == 8:
            expected = torch.where(block.signbit(), -1.0, 1.0) * block.double().abs().mean().float()
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@given(st.integers(1, 6), st.integers(-15, 15), st.integers(0, 2**31))
def test_two_magnitudes_are_the_means_of_small_and_large_numbers(count: int, power: int, seed: int) -> None:
    x = torch.randn(16 * count, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    for block, got in zip(x.split(16), back(TwoMagnitudes(block=16), x).split(16), strict=True):
        assert torch.equal(got.sign(), block.sign())
        magnitudes = block.double().abs()
        large = magnitudes > 1.1 * magnitudes.square().mean().sqrt()
        for some in (large, ~large):
            if some.any():  # bf16 has 8 bits of mantissa
                assert got[some].unique().abs().unique().numel() == 1
                assert float(got[some][0].abs()) == pytest.approx(float(magnitudes[some].mean()), rel=2**-8)


@pytest.mark.parametrize("x", [[0, 0, 0, 0, 0, 0, 0, -5], [0, 3, 0, -3, 0, 0, 0, 0], [2] * 8, [1e20] * 8])
def test_zeros_among_numbers_of_one_magnitude_are_kept(x: list[float]) -> None:
    found = back(TwoMagnitudes(block=8), torch.tensor(x, dtype=torch.float32))
    assert found.tolist() == torch.tensor(x).bfloat16().tolist()


@given(st.lists(st.integers(-1000, 1000), min_size=32, max_size=32, unique_by=abs))
def test_the_largest_are_kept_exactly_and_the_others_dropped(values: list[int]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    found = back(LargestEntries(ratio=0.25, block=16, values="fp32"), x)
    for block, got in zip(x.split(16), found.split(16), strict=True):
        threshold = block.abs().sort(descending=True).values[3]
        assert torch.equal(got, torch.where(block.abs() >= threshold, block, 0.0))


@given(st.integers(0, 2**31), st.integers(1, 500))
def test_random_entries_are_one_of_each_block_and_the_same_for_who_has_the_seed(seed: int, size: int) -> None:
    codec = RandomEntries(ratio=0.1, seed=seed)
    x = torch.arange(1.0, size + 1)
    found = back(codec, x)
    kept = found.nonzero().flatten()
    assert torch.equal(found[kept], x[kept])
    assert torch.equal(found, back(RandomEntries(ratio=0.1, seed=seed), x))
    assert kept.unique().numel() == kept.numel() <= -(-size // 10)


def test_random_places_differ_from_step_to_step_and_reach_everywhere() -> None:
    found = sum(back(reseeded(RandomEntries(ratio=0.25), step), torch.ones(8)) for step in range(100))
    assert isinstance(found, torch.Tensor)
    assert (found > 5).all()


@pytest.mark.parametrize("affine", [False, True])
def test_stochastic_rounding_is_right_on_average_and_repeatable(affine: bool) -> None:
    x = torch.tensor([7.0, -7.0, 0.3, 1.6, -2.2, 0.0, 5.5, -0.1])
    codec = Quantize(bits=4, block=8, affine=affine, stochastic=True)
    draws = torch.stack([back(reseeded(codec, step), x) for step in range(4000)])
    torch.testing.assert_close(draws.mean(0), x, atol=0.05, rtol=0)
    assert draws.unique(dim=0).shape[0] > 1
    assert torch.equal(back(codec, x), back(codec, x))


def test_chunks_of_a_large_tensor_draw_different_numbers() -> None:
    x = torch.full((1 << 19,), 0.5)
    x[::256] = 127.0
    first, second = back(Quantize(stochastic=True), x).chunk(2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "codec", [Quantize(), Quantize(bits=4, block=64), SignBits(), TwoMagnitudes(), Float8()], ids=str
)
def test_large_tensors_are_encoded_as_their_parts_are(codec: Any) -> None:
    x = torch.randn((1 << 18) + 1000, generator=torch.Generator().manual_seed(0))
    cut = codec.block * 900
    apart = torch.cat([back(codec, x[:cut]), back(codec, x[cut:])])
    assert torch.equal(back(codec, x)[: 1 << 18], apart[: 1 << 18])


@pytest.mark.parametrize("codec", [Quantize(), Cast(torch.float16)], ids=str)
def test_decoding_into_a_tensor_with_gaps_is_refused(codec: Codec) -> None:
    parts = codec.encode(torch.ones(6).view(2, 3))
    with pytest.raises(OptionError, match=r"into has strides \(1, 2\): codecs write to contiguous tensors"):
        codec.decode(parts, torch.empty(3, 2).T)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Quantize(bits=5), "bits=5 must be 8 or 4"),
        (lambda: Quantize(block=True), "block=True must be a whole number"),
        (lambda: Quantize(seed=None), "seed=None must be a whole number"),  # type: ignore[arg-type]
        (lambda: Quantize(block=0), "block=0 must be a whole number from 1"),
        (lambda: Quantize(bits=4, block=7), "block=7 must be a whole number from 2 to .* a multiple of 2"),
        (lambda: SignBits(block=12), "block=12 .* a multiple of 8"),
        (lambda: Float8(variant="e3m4"), "variant='e3m4' must be 'e4m3' or 'e5m2'"),  # type: ignore[arg-type]
        (lambda: LargestEntries(ratio=0.0), "ratio=0.0 must be above 0 and at most 1"),
        (lambda: LargestEntries(ratio=1.5), "ratio=1.5"),
        (lambda: LargestEntries(values="int3"), "values='int3' must be one of 'int2', 'in"),  # type: ignore[arg-type]
        (lambda: LargestEntries(block=40000), "block=40000"),
        (lambda: RandomEntries(ratio=-1), "ratio=-1"),
        (lambda: RandomEntries(ratio=math.nan), "ratio=nan"),
    ],
)
def test_wrong_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make()
