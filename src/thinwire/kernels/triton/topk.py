"""The kernels of an exchange of each block's largest numbers, with the bits of `codecs.topk.LargestEntries`.

    encode        this rank's numbers -> a row of bytes for each owner          (then all_to_all)
    mean_encode   received rows and own numbers -> the row of this owner        (then all_gather)
    decode        the rows of all owners -> gradients
    mean_decode   the rows of all senders -> the mean of their gradients        (after `Gathered`)

`launch_topk` describes the arguments. A program holds BLOCKS blocks as a tile [BLOCKS, TILE]. TILE is WIDTH
rounded up to a power of two. A block's encoding has KEPT entries in the order of their places:

    values      "bf16", "fp32": KEPT numbers. Others: the range of magnitudes, two numbers in bf16
    positions   lower parts of LOWER bits each, then the unary vector of the upper parts: UNARY bits
    codes       CODE bits each, sign in the lowest. None for "bf16" and "fp32"

Numbers are in registers by place, and bytes are made by rank, so entries move between threads. They do so
through `scratch`, global memory of the program: stores, a barrier, loads. A barrier of a CTA orders its
global accesses too, so no thread reads an entry before it is written.

Every count and sum is one of integers, so its order does not matter. As in `twoshot`, no branch depends on
values.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.kinds import (
    INFINITE,
    MAGNITUDE,
    NAN,
    ROUNDER,
    bf16_bits,
    bits_of,
    divided,
    float_of,
)
from thinwire.kernels.triton.twoshot import (
    at,
    blocks_of,
    narrowed,
    widened,
)

TINY = tl.constexpr(1e-33)  # `codecs.magnitudes.TINY`
UNIT = tl.constexpr(2.0**-20)  # `codecs.magnitudes._UNIT`
SMALLEST_UNIT = tl.constexpr(1.2e-38)  # `codecs.magnitudes._SMALLEST_UNIT`
PLACE_BITS = tl.constexpr(15)


@triton.jit
def corrected(values, old, keep, parameter, elements, inside, DTYPE: tl.constexpr, HAS_OLD: tl.constexpr):
    """Return value + (keep * old), in two roundings, and zeros for padding."""
    address = tl.broadcast_to(tl.load(values + parameter)[:, None], elements.shape)
    zero = 0.0 if DTYPE == "fp32" else 0
    x = widened(tl.load(at(address, elements, DTYPE), mask=inside, other=zero), DTYPE)
    if HAS_OLD:
        address = tl.broadcast_to(tl.load(old + parameter)[:, None], elements.shape)
        x = x + keep * tl.load(at(address, elements, "fp32"), mask=inside, other=0.0)
    return x


@triton.jit
def store_numbers(into, parameter, elements, inside, x, DTYPE: tl.constexpr):
    """Write numbers of blocks to their parameters."""
    address = tl.broadcast_to(tl.load(into + parameter)[:, None], elements.shape)
    tl.store(at(address, elements, DTYPE), narrowed(x, DTYPE), mask=inside)


@triton.jit
def selected(x, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Return which numbers are the KEPT largest of their block, the first of equal ones, and their ranks."""
    place = tl.arange(0, x.shape[1])[None, :]
    keys = tl.where(place < WIDTH, bits_of(x) & MAGNITUDE, -1)
    # Find the KEPT-th largest key bit by bit: the largest limit that at least KEPT keys reach.
    limit = tl.zeros((x.shape[0],), tl.int32)
    for step in range(31):
        higher = limit | (1 << (30 - step))
        reached = tl.sum((keys >= higher[:, None]).to(tl.int32), axis=1)
        limit = tl.where(reached >= KEPT, higher, limit)
    above = keys > limit[:, None]
    equal = keys == limit[:, None]
    # One scan counts both up to each place: those above in the lower half, and equal ones in the upper.
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=1)
    wanted = KEPT - tl.sum(above.to(tl.int32), axis=1)[:, None]
    ties = counts >> 16
    kept = above | (equal & (ties <= wanted))
    return kept, (counts & 0xFFFF) + tl.minimum(ties, wanted) - 1


@triton.jit
def two_means(magnitudes, kept, high, KEPT: tl.constexpr):
    """Return the means of the magnitudes up to their root mean square and of those above it."""
    unit = high * UNIT
    inverse = tl.where(unit > SMALLEST_UNIT, tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), unit), 0.0)
    # Zeros where the conversion of a non-finite number would be arbitrary. The block's range is NaN then.
    usable = kept & (bits_of(high) < INFINITE)[:, None]
    whole = tl.where(usable, magnitudes * inverse[:, None], 0.0).to(tl.int32)
    limit = tl.sum(whole.to(tl.int64) * whole.to(tl.int64), axis=1) // KEPT
    large = kept & (whole.to(tl.int64) * whole.to(tl.int64) > limit[:, None])
    count = tl.sum(large.to(tl.int32), axis=1)
    total = tl.sum(whole.to(tl.int64), axis=1)
    above = tl.sum(tl.where(large, whole, 0).to(tl.int64), axis=1)
    # The smallest square does not exceed the mean, so there are always numbers that are not large.
    low = tl.div_rn((total - above).to(tl.float32), (KEPT - count).to(tl.float32))
    mean = tl.div_rn(above.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    return low * unit, tl.where(count > 0, mean, low) * unit


@triton.jit
def encode_magnitudes(x, kept, KEPT: tl.constexpr, CODE: tl.constexpr):
    """Return the range as two bf16 of bits, and the codes, of `codecs.magnitudes.encode_magnitudes`."""
    LEVELS: tl.constexpr = (1 << (CODE - 1)) - 1
    bits = bits_of(x) & MAGNITUDE
    magnitudes = float_of(bits)
    most = tl.max(tl.where(kept, bits, 0), axis=1)
    least = tl.min(tl.where(kept, bits, MAGNITUDE), axis=1)
    finite = most < INFINITE
    if CODE == 2:
        small, large = two_means(magnitudes, kept, float_of(most), KEPT)
        low_bits = tl.where(finite, tl.where(least > 0, bf16_bits(small), 0), NAN >> 16)
        other_bits = tl.where(finite, bf16_bits(large), NAN >> 16)
        middle = (float_of(low_bits << 16) + float_of(other_bits << 16)) * 0.5
        code = (magnitudes > middle[:, None]).to(tl.int32)
    else:
        low_bits = tl.where(finite, bf16_bits(float_of(least)), NAN >> 16)
        low = float_of(low_bits << 16)
        other_bits = bf16_bits(divided(float_of(most) - low, LEVELS))
        step = float_of(other_bits << 16)
        inverse = tl.where(step > TINY, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step), 0.0)
        level = (magnitudes - low[:, None]) * inverse[:, None]
        # NaN is not above zero. Numbers that are not kept may be below the range.
        rounded = bits_of(tl.minimum(level, LEVELS) + ROUNDER) & 0xFF
        code = tl.where(level > 0, rounded, 0)
    return low_bits, other_bits, (code << 1) | (x < 0).to(tl.int32)


@triton.jit
def decode_magnitudes(low, other, code, CODE: tl.constexpr):
    """Return the numbers of codes. All have the same shape."""
    magnitude = tl.where(code > 1, other, low)
    if CODE > 2:
        magnitude = (code >> 1).to(tl.float32) * other + low
    return float_of((bits_of(magnitude) & MAGNITUDE) | (code << 31))


@triton.jit
def bytes_of(bits, BITS: tl.constexpr):
    """Join the integers of BITS bits of the last dimension to bytes, the first in the lowest bits."""
    shifts = tl.arange(0, bits.shape[2]) * BITS
    return tl.sum(bits << shifts[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def store_bytes(
    row, offset, index, exists, codes, STRIDE: tl.constexpr, START: tl.constexpr, COUNT: tl.constexpr
):
    """Write COUNT bytes of each block, from byte START of its STRIDE bytes on."""
    number = tl.arange(0, codes.shape[1])[None, :]
    target = row + offset + index.to(tl.int64)[:, None] * STRIDE + START + number
    tl.store(target, codes, mask=exists[:, None] & (number < COUNT))


@triton.jit
def encode_entries(
    x,
    row,
    values_offset,
    places_offset,
    codes_offset,
    scratch,
    index,
    exists,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUES: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
):
    """Write the encodings of blocks to a row of bytes, and return the tile of decoded numbers.

    `scratch` has 4 * KEPT + UNARY bytes for each block: a word for each entry, and a byte for each unary bit.
    """
    BLOCKS: tl.constexpr = x.shape[0]
    place = tl.arange(0, x.shape[1])[None, :]
    kept, rank = selected(x, WIDTH, KEPT)
    block = index.to(tl.int64)[:, None]
    written = kept & exists[:, None]
    words = place + tl.zeros_like(rank)
    if VALUES == "fp32":
        target = (row + values_offset).to(tl.pointer_type(tl.float32)) + block * KEPT + rank
        tl.store(target, x, mask=written)
        decoded = x
    elif VALUES == "bf16":
        numbers = bf16_bits(x)
        target = (row + values_offset).to(tl.pointer_type(tl.uint16)) + block * KEPT + rank
        tl.store(target, numbers.to(tl.uint16), mask=written)
        decoded = float_of(numbers << 16)
    else:
        low, other, code = encode_magnitudes(x, kept, KEPT, CODE)
        target = (row + values_offset).to(tl.pointer_type(tl.uint16)) + index.to(tl.int64) * 2
        tl.store(target, low.to(tl.uint16), mask=exists)
        tl.store(target + 1, other.to(tl.uint16), mask=exists)
        words = words | (code << PLACE_BITS)
        spread = tl.zeros_like(x)
        decoded = decode_magnitudes(
            float_of(low << 16)[:, None] + spread, float_of(other << 16)[:, None] + spread, code, CODE
        )

    own = tl.arange(0, BLOCKS)
    entries = scratch.to(tl.pointer_type(tl.int32)) + own[:, None] * KEPT
    ones = scratch + BLOCKS * KEPT * 4 + own[:, None] * UNARY
    SPAN: tl.constexpr = triton.next_power_of_2(UNARY)
    bit = tl.arange(0, SPAN)[None, :]
    tl.store(ones + bit, tl.zeros((BLOCKS, SPAN), tl.uint8), mask=bit < UNARY)
    tl.debug_barrier()
    tl.store(entries + rank, words, mask=kept)
    tl.store(ones + (place >> LOWER) + rank, tl.full(rank.shape, 1, tl.uint8), mask=kept)
    tl.debug_barrier()
    pack_entries(row, places_offset, codes_offset, entries, ones, index, exists, KEPT, LOWER, UNARY, CODE)
    return tl.where(kept, decoded, 0.0)


@triton.jit
def pack_entries(
    row,
    places_offset,
    codes_offset,
    entries,
    ones,
    index,
    exists,
    KEPT: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
):
    """Write the bytes of positions and codes, from words [BLOCKS, KEPT] and unary bits [BLOCKS, UNARY]."""
    LOWER_BYTES: tl.constexpr = (KEPT * LOWER + 7) // 8
    UNARY_BYTES: tl.constexpr = (UNARY + 7) // 8
    STRIDE: tl.constexpr = LOWER_BYTES + UNARY_BYTES
    number = tl.arange(0, triton.next_power_of_2(UNARY_BYTES))[:, None] * 8 + tl.arange(0, 8)[None, :]
    number = number[None, :, :]
    bits = tl.load(ones[:, :, None] + number, mask=number < UNARY, other=0).to(tl.int32)
    store_bytes(row, places_offset, index, exists, bytes_of(bits, 1), STRIDE, LOWER_BYTES, UNARY_BYTES)
    if LOWER > 0:
        number = tl.arange(0, triton.next_power_of_2(LOWER_BYTES))[:, None] * 8 + tl.arange(0, 8)[None, :]
        number = number[None, :, :]
        words = tl.load(entries[:, :, None] + number // LOWER, mask=number < KEPT * LOWER, other=0)
        bits = (words >> (number % LOWER)) & 1
        store_bytes(row, places_offset, index, exists, bytes_of(bits, 1), STRIDE, 0, LOWER_BYTES)
    if CODE > 0:
        CODE_BYTES: tl.constexpr = (KEPT * CODE + 7) // 8
        each = tl.arange(0, 8 // CODE)[None, :]
        number = tl.arange(0, triton.next_power_of_2(CODE_BYTES))[:, None] * (8 // CODE) + each
        number = number[None, :, :]
        codes = tl.load(entries[:, :, None] + number, mask=number < KEPT, other=0) >> PLACE_BITS
        store_bytes(row, codes_offset, index, exists, bytes_of(codes, CODE), CODE_BYTES, 0, CODE_BYTES)


@triton.jit
def load_entries(
    row,
    values_offset,
    places_offset,
    codes_offset,
    index,
    wanted,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUES: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
):
    """Return the entries of wanted blocks by unary bit: values, bits to check, places, and which exist.

    The bits to check are those of a magnitude that is non-finite by the rule of the codec's `finite`. Places
    are within the block, whatever the bytes are.
    """
    LOWER_BYTES: tl.constexpr = (KEPT * LOWER + 7) // 8
    STRIDE: tl.constexpr = LOWER_BYTES + (UNARY + 7) // 8
    block = index.to(tl.int64)[:, None]
    bit = tl.arange(0, triton.next_power_of_2(UNARY))[None, :]
    positions = row + places_offset + block * STRIDE
    present = wanted[:, None] & (bit < UNARY)
    unary = tl.load(positions + LOWER_BYTES + (bit >> 3), mask=present, other=0).to(tl.int32)
    unary = (unary >> (bit & 7)) & 1
    rank = tl.cumsum(unary, axis=1) - 1
    exists = (unary == 1) & (rank < KEPT)
    place = (bit - rank) << LOWER
    if LOWER > 0:
        start = rank * LOWER
        lower = tl.zeros_like(rank)
        # Parts of 1, 2, 4 or 8 bits are within a byte.
        for byte in tl.static_range(1 if 8 % LOWER == 0 else (LOWER + 6) // 8 + 1):
            inside = exists & ((start >> 3) + byte < LOWER_BYTES)
            loaded = tl.load(positions + (start >> 3) + byte, mask=inside, other=0)
            lower = lower | (loaded.to(tl.int32) << (8 * byte))
        place = place | ((lower >> (start & 7)) & ((1 << LOWER) - 1))
    if VALUES == "fp32":
        source = (row + values_offset).to(tl.pointer_type(tl.float32)) + block * KEPT + rank
        x = tl.load(source, mask=exists, other=0.0)
        checked = bits_of(x) & MAGNITUDE
    elif VALUES == "bf16":
        source = (row + values_offset).to(tl.pointer_type(tl.uint16)) + block * KEPT + rank
        x = widened(tl.load(source, mask=exists, other=0), "bf16")
        checked = bits_of(x) & MAGNITUDE
    else:
        spread = tl.zeros(rank.shape, tl.float32)
        source = (row + values_offset).to(tl.pointer_type(tl.uint16)) + block * 2
        low = widened(tl.load(source, mask=wanted[:, None], other=0), "bf16") + spread
        second = widened(tl.load(source + 1, mask=wanted[:, None], other=0), "bf16") + spread
        CODE_BYTES: tl.constexpr = (KEPT * CODE + 7) // 8
        start = rank * CODE
        source = row + codes_offset + block * CODE_BYTES + (start >> 3)
        code = tl.load(source, mask=exists, other=0).to(tl.int32)
        x = decode_magnitudes(low, second, (code >> (start & 7)) & ((1 << CODE) - 1), CODE)
        checked = tl.maximum(bits_of(low) & MAGNITUDE, bits_of(second) & MAGNITUDE)
    return x, checked, tl.minimum(place, WIDTH - 1), exists


@triton.jit
def dense(
    row,
    values_offset,
    places_offset,
    codes_offset,
    scratch,
    index,
    wanted,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUES: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
):
    """Return the tile of decoded numbers of wanted blocks, and zeros for others.

    `scratch` has TILE float32 for each block. A thread that loads a number also stores its zero in the next
    call, so that the numbers of a call are read before those of the next one are stored.
    """
    BLOCKS: tl.constexpr = index.shape[0]
    first = scratch.to(tl.pointer_type(tl.float32)) + tl.arange(0, BLOCKS)[:, None] * TILE
    numbers = first + tl.arange(0, TILE)[None, :]
    tl.store(numbers, tl.zeros((BLOCKS, TILE), tl.float32))
    tl.debug_barrier()
    x, _, place, exists = load_entries(
        row, values_offset, places_offset, codes_offset, index, wanted,
        WIDTH, KEPT, VALUES, LOWER, UNARY, CODE,
    )  # fmt: skip
    tl.store(first + place, x, mask=exists)
    tl.debug_barrier()
    return tl.load(numbers)


@triton.jit
def pushed(lowest, sums, term, number, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Add term `number` to a stack of partial sums, as `twoshot.pushed` does, and return its lowest level.

    Higher levels are in memory, level k at sums + (k - 1) * SIZE: ten levels of a wide block would not fit in
    registers. A thread reads only what it stored itself.
    """
    carries = (number & 1) == 1
    kept = tl.where(carries, lowest, term)
    term = lowest + term
    for level in tl.static_range(1, LEVELS):
        reached = (number & ((1 << level) - 1)) == (1 << level) - 1
        carries = ((number >> level) & 1) == 1
        there = sums + (level - 1) * SIZE
        held = tl.load(there, mask=reached & carries, other=0.0)
        tl.store(there, term, mask=reached & (carries == 0))
        term = tl.where(reached & carries, held + term, term)
    return kept


@triton.jit
def popped(lowest, sums, count, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Return the sum of a stack of `count` terms: the odd last ones are added from the lowest level up."""
    total = lowest
    for level in tl.static_range(1, LEVELS):
        held = ((count >> level) & 1) == 1
        empty = (count & ((1 << level) - 1)) == 0
        there = tl.load(sums + (level - 1) * SIZE, mask=held, other=0.0)
        total = tl.where(held, tl.where(empty, there, there + total), total)
    return total


@triton.jit
def tile_of(start, count, TILE: tl.constexpr):
    """Return the elements of blocks, and which are not padding."""
    place = tl.arange(0, TILE)[None, :]
    return start[:, None] + place, place < count[:, None]


@triton.jit(do_not_specialize=["skip"])
def encode(
    table,
    values,
    old,
    new,
    rows,
    scratch,
    keep,
    skip,
    blocks,
    row_bytes,
    values_offset,
    places_offset,
    codes_offset,
    scratch_bytes,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUES: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_NEW: tl.constexpr,
):
    """Encode value + keep * old of BLOCKS blocks of one owner, and write the error of the encoding."""
    owner = tl.program_id(1)
    program = owner.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    owner = owner + (owner >= skip).to(tl.int32)
    index, exists, parameter, start, count = blocks_of(
        table, owner, tl.program_id(0) * BLOCKS, blocks, BLOCKS
    )
    elements, inside = tile_of(start, count, TILE)
    x = corrected(values, old, keep, parameter, elements, inside, DTYPE, HAS_OLD)
    row = rows + owner.to(tl.int64) * row_bytes
    room = scratch + program * scratch_bytes
    decoded = encode_entries(
        x, row, values_offset, places_offset, codes_offset, room, index, exists,
        WIDTH, KEPT, VALUES, LOWER, UNARY, CODE,
    )  # fmt: skip
    if HAS_NEW:
        store_numbers(new, parameter, elements, inside, x - decoded, "fp32")


@triton.jit(do_not_specialize=["rank", "world"])
def mean_encode(
    table,
    values,
    old,
    new,
    received,
    into,
    scratch,
    keep,
    rank,
    world,
    blocks,
    row_bytes,
    values_offset,
    places_offset,
    codes_offset,
    scratch_bytes,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUES: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_NEW: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Average own and received numbers of BLOCKS blocks of this rank, and encode the mean."""
    index, exists, parameter, start, count = blocks_of(table, rank, tl.program_id(0) * BLOCKS, blocks, BLOCKS)
    elements, inside = tile_of(start, count, TILE)
    room = scratch + tl.program_id(0).to(tl.int64) * scratch_bytes
    # Scratch memory has decoded numbers, then partial sums, then entries.
    SIZE: tl.constexpr = BLOCKS * TILE
    place = tl.arange(0, BLOCKS)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    sums = room.to(tl.pointer_type(tl.float32)) + SIZE + place
    lowest = tl.zeros((BLOCKS, TILE), tl.float32)
    for number in range(world):
        sender = tl.full((), number, tl.int64)  # in the interpreter `number` is an int
        row = received + sender * row_bytes
        wanted = index < tl.where(sender == rank, 0, blocks)
        decoded = dense(
            row, values_offset, places_offset, codes_offset, room, index, wanted,
            TILE, WIDTH, KEPT, VALUES, LOWER, UNARY, CODE,
        )  # fmt: skip
        # Own numbers are loaded when it is their turn, so that they take no registers before.
        mine = inside & (sender == rank)
        own = corrected(values, old, keep, parameter, elements, mine, DTYPE, HAS_OLD)
        lowest = pushed(lowest, sums, tl.where(sender == rank, own, decoded), sender, SIZE, LEVELS)
    divisor = tl.full(lowest.shape, world, tl.float32)
    mean = tl.where(inside, tl.div_rn(popped(lowest, sums, world, SIZE, LEVELS), divisor), 0.0)
    room = room + LEVELS * SIZE * 4
    decoded = encode_entries(
        mean, into, values_offset, places_offset, codes_offset, room, index, exists,
        WIDTH, KEPT, VALUES, LOWER, UNARY, CODE,
    )  # fmt: skip
    if HAS_NEW:
        # The owner feeds this error back through its own residual, which has a weight of 1 / world.
        store_numbers(new, parameter, elements, inside, (mean - decoded) * divisor, "fp32")


@triton.jit
def decode(
    table,
    into,
    rows,
    flag,
    blocks,
    row_bytes,
    values_offset,
    places_offset,
    codes_offset,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUES: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decode BLOCKS blocks of one owner, and write 0 to the flag if one has a non-finite number."""
    owner = tl.program_id(1)
    index, _, parameter, start, count = blocks_of(table, owner, tl.program_id(0) * BLOCKS, blocks, BLOCKS)
    elements, inside = tile_of(start, count, TILE)
    zeros = tl.zeros((BLOCKS, TILE), tl.float32)
    store_numbers(into, parameter, elements, inside, zeros, DTYPE)
    # Entries are stored by other threads than the zeros at their places, and must come after them.
    tl.debug_barrier()
    row = rows + owner.to(tl.int64) * row_bytes
    x, checked, place, exists = load_entries(
        row, values_offset, places_offset, codes_offset, index, count > 0,
        WIDTH, KEPT, VALUES, LOWER, UNARY, CODE,
    )  # fmt: skip
    # Where a block has fewer numbers than it keeps, zeros of the padding are kept.
    inside = exists & (place < count[:, None])
    store_numbers(into, parameter, start[:, None] + place, inside, x, DTYPE)
    most = tl.max(tl.max(tl.where(exists, checked, 0), axis=1), axis=0)
    tl.store(flag, 0, mask=most >= INFINITE)


@triton.jit(do_not_specialize=["world"])
def mean_decode(
    table,
    into,
    rows,
    flag,
    scratch,
    world,
    blocks,
    row_bytes,
    values_offset,
    places_offset,
    codes_offset,
    scratch_bytes,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUES: tl.constexpr,
    LOWER: tl.constexpr,
    UNARY: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Average BLOCKS blocks of all senders, and write 0 to the flag if a mean is non-finite."""
    owner = tl.program_id(1)
    index, _, parameter, start, count = blocks_of(table, owner, tl.program_id(0) * BLOCKS, blocks, BLOCKS)
    elements, inside = tile_of(start, count, TILE)
    room = scratch + tl.program_id(0).to(tl.int64) * scratch_bytes
    total = tl.zeros((BLOCKS, TILE), tl.float32)
    for number in range(world):
        row = rows + tl.full((), number, tl.int64) * row_bytes
        total = total + dense(
            row, values_offset, places_offset, codes_offset, room, index, count > 0,
            TILE, WIDTH, KEPT, VALUES, LOWER, UNARY, CODE,
        )  # fmt: skip
    mean = tl.div_rn(total, tl.full(total.shape, world, tl.float32))
    store_numbers(into, parameter, elements, inside, mean, DTYPE)
    most = tl.max(tl.max(tl.where(inside, bits_of(mean) & MAGNITUDE, 0), axis=1), axis=0)
    tl.store(flag, 0, mask=most >= INFINITE)
