"""Tests of the properties that a codec needs for gradients."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from thinwire.codecs.codec import BlockCodec, Codec, Parts, reseeded
from thinwire.programs.allreduce import Reduced
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import Gathered
from thinwire.programs.program import Program
from thinwire.programs.twoshot import TwoShot
from thinwire.testing.program import check_program

_SIZES = (0, 1, 2, 7, 8, 9, 63, 255, 256, 257, 1000, 4099)
_MANY = 1 << 16


def check_codec(codec: Codec) -> None:
    """Check that a codec can be used on gradients.

    - It accepts any length, shape and floating-point dtype.
    - Zeros are decoded to zeros.
    - The dtypes and shapes of an encoding depend only on its length.
    - A non-finite input is decoded to a non-finite output.
    - The encoding has the size that `wire_bits` declares.
    - With error feedback, the mean of the decoded numbers approaches the input.
    - Four simulated ranks receive the same mean, and nothing is lost between mean and errors.

    Args:
        codec: The codec to check.

    Raises:
        AssertionError: The codec breaks a rule, or raises. The message names the rule and the input.

    Example::

        thinwire.testing.check_codec(thinwire.Quantize(bits=4))
    """
    for check in _CHECKS:
        check(codec)


def programs_for(codec: Codec) -> list[Program]:
    """Return the programs that can use a codec."""
    return [TwoShot(codec), Gathered(codec), *([Reduced(codec)] if codec.additive else [])]


def _encoded(codec: Codec, x: torch.Tensor) -> Parts:
    with _naming(codec, "encode", x):
        return codec.encode(x)


def _decoded(codec: Codec, parts: Parts, into: torch.Tensor) -> torch.Tensor:
    with _naming(codec, "decode", into):
        return codec.decode(parts, into)


def _round_trip(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return _decoded(codec, _encoded(codec, x), torch.empty_like(x))


@contextlib.contextmanager
def _naming(codec: Codec, method: str, numbers: torch.Tensor) -> Iterator[None]:
    """Turn an exception of a codec into a failed check that names the input.

    The traceback ends inside the codec, which sees only blocks of the input.
    """
    try:
        yield
    except Exception as error:
        what = f"{numbers.numel()} numbers (shape {tuple(numbers.shape)}, {numbers.dtype})"
        raise AssertionError(
            f"{codec}: {method} of {what} raised {type(error).__name__}: {error}{_hint(codec, numbers)}"
        ) from error


def _hint(codec: Codec, numbers: torch.Tensor) -> str:
    """Return the shape that `encode_blocks` or `decode_blocks` had to deal with."""
    if not isinstance(codec, BlockCodec):
        return ""
    width = codec.width(numbers.numel())
    return f". Its blocks have shape ({-(-numbers.numel() // width)}, {width}), with block={codec.block}"


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _form(parts: Parts) -> list[tuple[torch.dtype, torch.Size]]:
    return [(part.dtype, part.shape) for part in parts]


def _any_size(codec: Codec) -> None:
    for size in _SIZES:
        x = _numbers(size)
        before, parts = x.clone(), _encoded(codec, x)
        assert torch.equal(x, before), f"{codec} modifies its input of {size} numbers"
        assert all(part.data_ptr() != x.data_ptr() for part in parts if part.numel()), (
            f"{codec} returns its input instead of a copy"
        )
        into = torch.full((size,), math.nan)
        assert _decoded(codec, parts, into) is into, f"{codec} does not return `into`"
        assert into.isfinite().all(), f"{codec} leaves some of {size} numbers unwritten or non-finite"


def _any_shape_and_dtype(codec: Codec) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = _numbers(5, 3, 7, dtype=dtype)
        back, flat = _round_trip(codec, x), _round_trip(codec, x.flatten())
        assert (back.shape, back.dtype) == (x.shape, dtype), f"{codec} decodes {dtype} to {back.dtype}"
        assert torch.equal(back.flatten(), flat), f"{codec} depends on the shape of its input ({dtype})"
        single = _round_trip(codec, x.flatten().float()).to(dtype)
        assert torch.equal(flat, single), (
            f"{codec} encodes {dtype} differently from the same numbers in float32"
        )


def _zeros(codec: Codec) -> None:
    for size in _SIZES:
        back = _round_trip(codec, torch.zeros(size))
        assert not back.any(), f"{codec} decodes {size} zeros to other values: {back[:5]}"


def _extremes(codec: Codec) -> None:
    for factor in (1e-45, 1e-38, 1e-36, 1e-35, 1e-34, 1e-33, 1e-20, 1e4):
        back = _round_trip(codec, factor * _numbers(1000).clamp(-4, 4))
        assert back.isfinite().all(), f"{codec} decodes numbers of magnitude {factor:g} to {back}"
        assert back.abs().max() <= 8 * factor, (
            f"{codec} decodes numbers of magnitude {factor:g} to {back.abs().max():g}"
        )


def _form_depends_on_length_alone(codec: Codec) -> None:
    for size in _SIZES:
        forms = [
            _form(_encoded(codec, x)) for x in (_numbers(size), torch.zeros(size), torch.full((size,), 1e30))
        ]
        assert forms[0] == forms[1] == forms[2], f"{codec} encodes {size} numbers in different forms: {forms}"


def _overflow_shows(codec: Codec) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        for place in (0, 500, 999):
            x = _numbers(1000)
            x[place] = bad
            assert not _round_trip(codec, x).isfinite().all(), (
                f"{codec} hides {bad} at index {place}: ranks would not detect the overflow"
            )


def _bytes_as_declared(codec: Codec) -> None:
    parts = _encoded(codec, _numbers(_MANY))
    bits = 8 * sum(part.numel() * part.element_size() for part in parts) / _MANY
    declared = codec.wire_bits
    assert abs(bits - declared) <= 0.02 * declared, (
        f"{codec} declares wire_bits={declared} and uses {bits} bits per number"
    )


def _adding_is_decoding(codec: Codec) -> None:
    for size in (1, 257, 4099):
        parts, start = _encoded(codec, _numbers(size)), torch.full((size,), 3.0)
        expected = start - 0.5 * _decoded(codec, parts, torch.empty(size))
        with _naming(codec, "add", start):
            codec.add(parts, start, -0.5)
        assert torch.allclose(start, expected, atol=1e-6), (
            f"{codec}: add() adds other values than decode() returns"
        )


def _sums_where_it_says_so(codec: Codec) -> None:
    if codec.additive:
        a, b = _numbers(1000), _numbers(1000).flip(0)
        total = tuple(
            first + other for first, other in zip(_encoded(codec, a), _encoded(codec, b), strict=True)
        )
        separate = _round_trip(codec, a) + _round_trip(codec, b)
        together = _decoded(codec, total, torch.empty(1000))
        error = (together - separate).norm() / separate.norm()
        assert error < 0.01, f"{codec} is declared additive, but a sum of encodings is off by {error:.1%}"


def _feedback_gets_everything_across(codec: Codec) -> None:
    """Check that repeated sending with error feedback delivers all numbers, including the last ones."""
    for size in (1, 257, 1000):
        x, steps = _numbers(size), 600
        residual = torch.zeros(size)
        # 600 steps deliver every number of a codec that sends one in a hundred at least a few times.
        for step in range(steps):
            drawn = reseeded(codec, step)
            residual += x
            residual -= _round_trip(drawn, residual)
        for what, part, allowed in (("", slice(None), 0.35), (" at their end", slice(-3, None), 0.9)):
            off = residual[part].norm() / steps / x[part].norm()
            assert off < allowed, (
                f"{codec} with feedback: {size} numbers are off by {off:.0%}{what} after {steps} steps"
            )


def _four_ranks(codec: Codec) -> None:
    for program in programs_for(codec):
        loses = 0.005 if isinstance(program, Reduced) else 1e-5
        check_program(program, loses=loses, tolerance=None)
        if program.tracks_error:
            check_program(ErrorFeedback(program), loses=loses, tolerance=None)


_CHECKS: tuple[Callable[[Codec], None], ...] = (
    _any_size,
    _any_shape_and_dtype,
    _zeros,
    _extremes,
    _form_depends_on_length_alone,
    _overflow_shows,
    _bytes_as_declared,
    _adding_is_decoding,
    _sums_where_it_says_so,
    _feedback_gets_everything_across,
    _four_ranks,
)
