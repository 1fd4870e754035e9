"""Encode and decode blocks of numbers, for each kind of `thinwire.kernels.blocks.KINDS`.

A program holds BLOCKS blocks as a tile [BLOCKS, PARTS, LANES] of float32. A byte holds one number of each
part: number p * (width / PARTS) + i of a block has bits p * 8 / PARTS and up of byte i.

    kind            PARTS   byte i
    int8 e4m3 e5m2  1       number i
    int4            2       one number of each half of the block
    int2            4       one number of each quarter
    sign            8       one number of each eighth

The bits must equal those of the C kernels and of the torch codecs, so every rounding is written down:

- Kernels are compiled with `enable_fp_fusion=False`. A fused multiply-add rounds once instead of twice.
- Divisions are `div_rn`. The operator `/` compiles to an approximation with an error of 2 ulp.
- The largest magnitude is a maximum of integers. The maximum of floats ignores NaN on some GPUs.
- Sums of a block are taken in the order of `codecs.magnitudes.sums_of`.
- Conversions to float8 and bf16 are made of integer operations. Hardware and the interpreter differ for NaN,
  overflow and subnormal numbers.
"""

import triton
import triton.language as tl

ROUNDER = tl.constexpr(
    12582912.0
)  # 1.5 * 2**23: adding it rounds to an integer, ties to even, in the low bits
SMALLEST = tl.constexpr(2.0**-126)  # `codecs.magnitudes.SMALLEST`
THRESHOLD = tl.constexpr(1.21)  # of `codecs.two_magnitudes`
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)


@triton.jit
def bits_of(x):
    """Return the bits of float32 numbers."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 numbers with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def divided(x, by):
    """Return x / by, rounded to nearest. `by` is a number."""
    return tl.div_rn(x, tl.full(x.shape, by, tl.float32))


@triton.jit
def levels_of(KIND: tl.constexpr):
    """Return the code of a block's largest magnitude, or 1 if the scale is a magnitude itself."""
    if KIND == "int8":
        return 127.0
    elif KIND == "int4":
        return 7.0
    elif KIND == "e4m3":
        return 448.0
    elif KIND == "e5m2":
        return 57344.0
    else:
        return 1.0


@triton.jit
def bf16_bits(x):
    """Return the bits of float32 numbers rounded to bf16, ties to even, in the lower half. NaN is 0x7fc0."""
    bits = bits_of(x)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    # The carry of a NaN with many ones would make it zero.
    return tl.where((bits & MAGNITUDE) > INFINITE, NAN >> 16, rounded)


@triton.jit
def sum_of(x):
    """Return the sums of rows: the second half is added to the first until one column is left."""
    rows: tl.constexpr = x.shape[0]
    left: tl.constexpr = x.shape[1]
    if left == 1:
        return tl.reshape(x, (rows,))
    else:
        # A sum of two is the same in either order, so `tl.sum` has no choice here.
        return sum_of(tl.sum(tl.reshape(x, (rows, 2, left // 2)), axis=1))


@triton.jit
def largest_magnitude(x):
    """Return the bits of the largest magnitude of each block. A NaN beats infinity."""
    return tl.max(tl.max(bits_of(x) & MAGNITUDE, axis=2), axis=1)


@triton.jit
def scale_of(most, LEVELS: tl.constexpr):
    """Return the largest magnitude times 1/levels, at least SMALLEST. A NaN stays one."""
    SHARE: tl.constexpr = 1.0 / LEVELS
    scale = most * SHARE
    return tl.where(scale < SMALLEST, SMALLEST, scale)


@triton.jit
def inverse_of(scale):
    """Return 1 / scale, rounded to nearest."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def spread(x):
    """Return one number per block with the dimensions of a tile."""
    return x[:, None, None]


@triton.jit
def packed(codes, PARTS: tl.constexpr):
    """Return the bytes [BLOCKS, LANES] of non-negative integers of 8 / PARTS bits."""
    shifts = tl.arange(0, PARTS) * (8 // PARTS)
    return tl.sum(codes << shifts[None, :, None], axis=1).to(tl.uint8)


@triton.jit
def unpacked(codes, PARTS: tl.constexpr):
    """Return the integers [BLOCKS, PARTS, LANES] of bytes [BLOCKS, LANES]."""
    shifts = tl.arange(0, PARTS) * (8 // PARTS)
    return (codes.to(tl.int32)[:, None, :] >> shifts[None, :, None]) & ((1 << (8 // PARTS)) - 1)


@triton.jit
def float8_code(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the float8 codes of magnitudes, given as bits, that do not overflow the format."""
    drop: tl.constexpr = 23 - MANTISSA
    # Near this number the step from one float32 to the next is the format's smallest number.
    shift: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    moved = float_of(magnitude) + float_of(tl.full(magnitude.shape, shift, tl.int32))
    subnormal = bits_of(moved) - shift
    odd = (magnitude >> drop) & 1
    normal = (magnitude - ((127 - BIAS) << 23) + ((1 << (drop - 1)) - 1) + odd) >> drop
    return tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)


@triton.jit
def to_float8(x, KIND: tl.constexpr):
    """Return float32 numbers as float8 codes, rounded to nearest, ties to even."""
    magnitude = bits_of(x) & MAGNITUDE
    sign = (bits_of(x) >> 24) & 0x80
    if KIND == "e4m3":
        # From 480 on, the next value after 448 and a NaN in this format, magnitudes become NaN.
        code = tl.where(magnitude >= 0x43F00000, 0x7F, float8_code(magnitude, 3, 7))
    else:
        # From 65536 on magnitudes become infinity, and NaN stays NaN.
        special = tl.where(magnitude > INFINITE, 0x7F, 0x7C)
        code = tl.where(magnitude >= 0x47800000, special, float8_code(magnitude, 2, 15))
    return sign | code


@triton.jit
def from_float8(code, KIND: tl.constexpr):
    """Return float8 codes as float32. A power of two corrects the bias, of subnormal codes too."""
    sign = (code & 0x80) << 24
    if KIND == "e4m3":
        # NaN becomes 480 instead of NaN. Its block has a non-finite scale, so the product is non-finite.
        magnitude = bits_of(float_of((code & 0x7F) << 20) * 1329227995784915872903807060280344576.0)  # 2**120
    else:
        plain = bits_of(float_of((code & 0x7F) << 21) * 5192296858534827628530496329220096.0)  # 2**112
        magnitude = tl.where((code & 0x7C) == 0x7C, INFINITE | ((code & 3) << 21), plain)
    return float_of(magnitude | sign)


@triton.jit
def decode_blocks(scale, codes, KIND: tl.constexpr, PARTS: tl.constexpr):
    """Return the tile of float32 numbers of scales [BLOCKS] and bytes [BLOCKS, LANES]."""
    code = unpacked(codes, PARTS)
    if KIND == "int8":
        return ((code << 24) >> 24).to(tl.float32) * spread(scale)
    elif KIND == "int4":
        return ((code << 28) >> 28).to(tl.float32) * spread(scale)
    elif KIND == "sign":
        # Exact, for zeros too, and in fewer registers than operations on the sign bit (128 in `mean_encode`).
        return spread(scale) * (1 - 2 * code).to(tl.float32)
    elif KIND == "int2":
        halves = bits_of(scale)
        magnitude = tl.where((code & 2) != 0, spread(halves & ~0xFFFF), spread(halves << 16))
        return float_of(magnitude ^ (code << 31))
    else:
        return from_float8(code, KIND) * spread(scale)


@triton.jit
def encode_integers(x, KIND: tl.constexpr, PARTS: tl.constexpr):
    """Encode to int8 or int4. Of a block with a non-finite number, codes are 0 and decoded numbers NaN."""
    LEVELS: tl.constexpr = levels_of(KIND)
    bits = largest_magnitude(x)
    scale = scale_of(float_of(bits), LEVELS)
    usable = bits < INFINITE
    shifted = x * spread(inverse_of(scale)) + ROUNDER
    code = tl.where(spread(usable), bits_of(shifted), 0) & ((1 << (8 // PARTS)) - 1)
    decoded = tl.where(spread(usable), (shifted - ROUNDER) * spread(scale), float("nan"))
    return scale, packed(code, PARTS), decoded


@triton.jit
def encode_float8(x, KIND: tl.constexpr):
    """Encode to e4m3 or e5m2."""
    LEVELS: tl.constexpr = levels_of(KIND)
    scale = scale_of(float_of(largest_magnitude(x)), LEVELS)
    code = to_float8(x * spread(inverse_of(scale)), KIND)
    return scale, packed(code, 1), from_float8(code, KIND) * spread(scale)


@triton.jit
def encode_signs(x, count, WIDTH: tl.constexpr):
    """Encode to signs and the mean magnitude of the block's `count` numbers."""
    flat = tl.reshape(x, (x.shape[0], WIDTH))
    scale = divided(sum_of(float_of(bits_of(flat) & MAGNITUDE)), WIDTH)
    # Padding must not lower the magnitude of a short block. The quotient of two small integers has the same
    # bits whether it is rounded from float64, as in C, or at once.
    real = tl.where(count > 0, count, WIDTH).to(tl.float32)
    scale = scale * tl.div_rn(tl.full(real.shape, WIDTH, tl.float32), real)
    code = (bits_of(x) >> 31) & 1
    return scale, packed(code, 8), float_of(bits_of(spread(scale)) ^ (code << 31))


@triton.jit
def encode_two_magnitudes(x, WIDTH: tl.constexpr):
    """Encode to signs and the means of the small and of the large magnitudes, both as bf16 in one float32."""
    flat = tl.reshape(x, (x.shape[0], WIDTH))
    magnitudes = float_of(bits_of(flat) & MAGNITUDE)
    total = sum_of(magnitudes)
    SHARE: tl.constexpr = THRESHOLD / WIDTH
    threshold = sum_of(flat * flat) * SHARE
    large = flat * flat > threshold[:, None]
    count = tl.sum(large.to(tl.int32), axis=1)
    above = sum_of(magnitudes * large.to(tl.float32))
    high = tl.div_rn(above, tl.maximum(count, 1).to(tl.float32))
    low = tl.div_rn(total - above, tl.maximum(WIDTH - count, 1).to(tl.float32))
    # If a block has only one kind, both means are equal.
    small = tl.where(count == WIDTH, high, low)
    big = tl.where(count == 0, low, high)
    # With a non-finite number the threshold is non-finite too, no number is large, and both are non-finite.
    lower, upper = bf16_bits(small), bf16_bits(big)
    scale = float_of((upper << 16) | lower)
    code = ((bits_of(x) >> 31) & 1) | ((x * x > spread(threshold)).to(tl.int32) << 1)
    magnitude = tl.where((code & 2) != 0, spread(upper << 16), spread(lower << 16))
    return scale, packed(code, 4), float_of(magnitude ^ (code << 31))


@triton.jit
def encode_blocks(x, count, KIND: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return scales [BLOCKS], bytes [BLOCKS, LANES], and the tile of decoded numbers.

    Args:
        x: The tile, with zeros for padding.
        count: Numbers of each block that are not padding.
        KIND: A kind of `thinwire.kernels.blocks.KINDS`.
        WIDTH: Numbers in a block, with its padding.
        PARTS: Numbers in a byte.
    """
    if KIND == "sign":
        return encode_signs(x, count, WIDTH)
    elif KIND == "int2":
        return encode_two_magnitudes(x, WIDTH)
    elif KIND == "int8" or KIND == "int4":
        return encode_integers(x, KIND, PARTS)
    else:
        return encode_float8(x, KIND)


@triton.jit
def finite_scale(scale, KIND: tl.constexpr):
    """Return whether all numbers of each block are finite, by the rule of the codec's `finite`."""
    return (bits_of(scale * levels_of(KIND)) & MAGNITUDE) < INFINITE
