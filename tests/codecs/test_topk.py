"""The packed form of sparse numbers: bits, positions, and values in few bits."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import LargestEntries, OptionError
from thinwire.codecs.magnitudes import decode_magnitudes, encode_magnitudes
from thinwire.codecs.positions import Positions, pack_bits, packed_bytes, unpack_bits
from thinwire.codecs.topk import Values, largest
from thinwire.kernels import library, packing


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 15), st.integers(0, 5), st.integers(0, 70), st.integers(0, 2**31))
def test_packed_integers_come_back(bits: int, rows: int, count: int, seed: int) -> None:
    numbers = torch.randint(1 << bits, (rows, count), generator=drawn(seed))
    packed = pack_bits(numbers, bits)
    assert packed.shape == (rows, packed_bytes(count, bits))
    assert torch.equal(unpack_bits(packed, bits, count).long(), numbers)
    with library.switched_off():
        assert torch.equal(pack_bits(numbers, bits), packed)
        assert torch.equal(unpack_bits(packed, bits, count).long(), numbers)


@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 4), st.integers(0, 2**31))
def test_positions_come_back_in_as_many_bytes_as_declared(
    width: int, share: float, rows: int, seed: int
) -> None:
    kept = max(1, round(width * share))
    places = torch.rand(rows, width, generator=drawn(seed)).argsort(1)[:, :kept].sort(1).values
    code = Positions(width, kept)
    packed = code.pack(places)
    assert packed.shape == (rows, code.nbytes)
    assert torch.equal(code.unpack(packed), places)
    with library.switched_off():
        assert torch.equal(code.pack(places), packed)
        assert torch.equal(code.unpack(packed), places)


NUMBERS, BYTES = torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: packing.pack(NUMBERS, 4, 2),
        lambda: packing.pack(NUMBERS.int(), 4, 3),
        lambda: packing.unpack(BYTES, 4, 7),
        lambda: packing.pack_positions(NUMBERS, 2, 9, 3),
        lambda: packing.unpack_positions(BYTES, 40, 9, 1),
    ],
)
def test_native_packing_refuses_what_it_would_overrun(call: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(OptionError, match=r"bytes of|cannot be passed to native code"):
        call()


@pytest.mark.parametrize(("width", "kept", "most"), [(4096, 64, 8.0), (1024, 10, 10.0), (256, 16, 6.0)])
def test_positions_take_fewer_bits_than_plain_ones(width: int, kept: int, most: float) -> None:
    assert 8 * Positions(width, kept).nbytes / kept <= most
    first, last = torch.arange(kept)[None], torch.arange(width - kept, width)[None]
    for places in (first, last):
        assert torch.equal(Positions(width, kept).unpack(Positions(width, kept).pack(places)), places)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 80), st.integers(-30, 30), st.integers(0, 2**31))
def test_values_keep_their_signs_and_are_within_the_range(
    bits: int, count: int, power: int, seed: int
) -> None:
    x = (1 + torch.rand(3, count, generator=drawn(seed))) * 10.0**power
    x *= torch.randint(2, x.shape, generator=drawn(seed + 1)) * 2 - 1
    found = decode_magnitudes(*encode_magnitudes(x, bits), bits)
    assert torch.equal(found.sign(), x.sign())
    magnitudes = x.abs()
    spread = magnitudes.amax(1, keepdim=True) - magnitudes.amin(1, keepdim=True)
    # bf16 has 8 bits of mantissa, for the range's lower end and, with 2 bits, both means.
    allowed = spread * (1.0 if bits == 2 else 0.51 / (2 ** (bits - 1) - 1)) + magnitudes * 2**-7
    assert ((x - found).abs() <= allowed).all()


def test_two_magnitudes_are_the_means_of_what_is_below_and_above_the_mean() -> None:
    x = torch.tensor([[1.0, -1.0, 2.0, -8.0, 12.0, 0.5]])
    found = decode_magnitudes(*encode_magnitudes(x, 2), 2)
    assert found[0].tolist() == [1.125, -1.125, 1.125, -10.0, 10.0, 1.125]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_among_the_kept_stay_zeros(bits: int) -> None:
    x = torch.tensor([[0.0, 0.0, 3.0, -5.0], [0.0, 0.0, 0.0, 0.0]])
    found = decode_magnitudes(*encode_magnitudes(x, bits), bits)
    assert not found[x == 0].any()
    assert found[0, 3] < 0


@pytest.mark.parametrize("values", ["int2", "int4", "int8"])
def test_only_the_largest_are_sent(values: Values) -> None:
    codec = LargestEntries(ratio=64 / 4096, block=4096, values=values)
    x = torch.randn(3 * 4096 + 100, generator=drawn(0))
    found = codec.decode(codec.encode(x), torch.empty_like(x))
    for own, got in zip(x[: 3 * 4096].split(4096), found.split(4096), strict=False):
        assert torch.equal(got.nonzero().flatten(), largest(own[None], 64)[0])


@given(st.binary(min_size=64, max_size=64), st.integers(1, 40), st.integers(40, 300))
def test_bytes_that_no_encoder_writes_give_positions_within_the_block(
    noise: bytes, kept: int, width: int
) -> None:
    code = Positions(width, kept)
    packed = torch.tensor(list(noise * 40), dtype=torch.uint8)[: 3 * code.nbytes].reshape(3, code.nbytes)
    places = code.unpack(packed)
    assert places.shape == (3, kept)
    assert int(places.min()) >= 0
    assert int(places.max()) < width
