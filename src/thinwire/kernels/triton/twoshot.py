"""The kernels of a two-shot exchange: encode for every owner, average and encode again, decode.

    encode          this rank's numbers -> a row of bytes for each owner         (then all_to_all)
    mean_encode     received rows and own numbers -> the row of this owner       (then all_gather)
    decode          the rows of all owners -> gradients

Numbers that are not encoded ("exact") take the same path in `gather_exact`, `mean_exact` and `scatter_exact`.
`launch` describes the arguments.

No branch depends on values, and none differs between the programs of a launch: a program skips numbers by
masks. So a test can run the compiled code of all programs in lockstep.
"""

import triton
import triton.language as tl

from thinwire.kernels.triton.kinds import (
    INFINITE,
    MAGNITUDE,
    bf16_bits,
    bits_of,
    decode_blocks,
    encode_blocks,
    finite_scale,
    float_of,
)


@triton.jit
def at(addresses, elements, DTYPE: tl.constexpr):
    """Return pointers to elements of tensors that start at these addresses. Both have the same shape."""
    if DTYPE == "fp32":
        return addresses.to(tl.pointer_type(tl.float32)) + elements
    else:
        return addresses.to(tl.pointer_type(tl.uint16)) + elements


@triton.jit
def widened(numbers, DTYPE: tl.constexpr):
    """Return loaded numbers as float32, exactly."""
    if DTYPE == "fp32":
        return numbers
    elif DTYPE == "bf16":
        return float_of(numbers.to(tl.int32) << 16)
    else:
        return numbers.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """Return float32 numbers as they are stored: rounded to nearest, ties to even."""
    if DTYPE == "fp32":
        return x
    elif DTYPE == "bf16":
        return bf16_bits(x).to(tl.uint16)
    else:
        return x.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def lanes_of(WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return the lanes of a tile, and the places of its numbers in blocks, WIDTH for no number."""
    LANES: tl.constexpr = triton.next_power_of_2(WIDTH // PARTS)
    lane = tl.arange(0, LANES)
    place = tl.arange(0, PARTS)[:, None] * (WIDTH // PARTS) + lane[None, :]
    return lane, tl.where(lane[None, :] < WIDTH // PARTS, place, WIDTH)


@triton.jit
def blocks_of(table, owner, first, blocks, BLOCKS: tl.constexpr):
    """Return the numbers of BLOCKS blocks of an owner, which of them exist, and their rows of the table."""
    index = first + tl.arange(0, BLOCKS)
    exists = index < blocks
    row = table + (owner.to(tl.int64) * blocks + index) * 3
    parameter = tl.load(row, mask=exists, other=0)
    start = tl.load(row + 1, mask=exists, other=0)
    count = tl.load(row + 2, mask=exists, other=0)
    return index, exists, parameter, start, count


@triton.jit
def corrected(values, old, keep, parameter, elements, inside, DTYPE: tl.constexpr, HAS_OLD: tl.constexpr):
    """Return value + (keep * old), in two roundings, and zeros for padding."""
    address = tl.broadcast_to(tl.load(values + parameter)[:, None, None], elements.shape)
    zero = 0.0 if DTYPE == "fp32" else 0
    x = widened(tl.load(at(address, elements, DTYPE), mask=inside, other=zero), DTYPE)
    if HAS_OLD:
        address = tl.broadcast_to(tl.load(old + parameter)[:, None, None], elements.shape)
        x = x + keep * tl.load(at(address, elements, "fp32"), mask=inside, other=0.0)
    return x


@triton.jit
def store_encoding(row, scale_offset, codes_offset, index, exists, scale, codes, lane, BYTES: tl.constexpr):
    """Write scales and codes of blocks to a row of bytes."""
    tl.store((row + scale_offset).to(tl.pointer_type(tl.float32)) + index, scale, mask=exists)
    places = index.to(tl.int64)[:, None] * BYTES + lane[None, :]
    tl.store(row + codes_offset + places, codes, mask=exists[:, None] & (lane < BYTES)[None, :])


@triton.jit
def load_encoding(row, scale_offset, codes_offset, index, wanted, lane, BYTES: tl.constexpr):
    """Return scales and codes of the wanted blocks of a row of bytes, and zeros for others."""
    scale = tl.load((row + scale_offset).to(tl.pointer_type(tl.float32)) + index, mask=wanted, other=0.0)
    places = index.to(tl.int64)[:, None] * BYTES + lane[None, :]
    mask = wanted[:, None] & (lane < BYTES)[None, :]
    return scale, tl.load(row + codes_offset + places, mask=mask, other=0)


@triton.jit
def store_error(new, parameter, elements, inside, error):
    """Write the errors of blocks."""
    address = tl.broadcast_to(tl.load(new + parameter)[:, None, None], elements.shape)
    tl.store(at(address, elements, "fp32"), error, mask=inside)


@triton.jit
def pushed(stack, term, number, LEVELS: tl.constexpr):
    """Add term `number` to a stack of partial sums, as 1 is added to the bits of `number`.

    Level k holds a sum of 2**k consecutive terms if bit k of the number of terms is set. So adjacent pairs
    are added, then adjacent pairs of pairs, for any number of terms in one pass.
    """
    for level in tl.static_range(LEVELS):
        reached = (number & ((1 << level) - 1)) == (1 << level) - 1
        carries = ((number >> level) & 1) == 1
        total = stack[level] + term
        # Without a carry the term rests here, and higher levels are not reached.
        stack = replaced(stack, tl.where(reached & (carries == 0), term, stack[level]), level)
        term = tl.where(reached & carries, total, term)
    return stack


@triton.jit
def replaced(stack, value, level: tl.constexpr):
    """Return the tuple with another value at this level."""
    return stack[:level] + (value,) + stack[level + 1 :]


@triton.jit
def popped(stack, count, LEVELS: tl.constexpr):
    """Return the sum of a stack of `count` terms: the odd last ones are added from the lowest level up."""
    total = stack[0]
    for level in tl.static_range(1, LEVELS):
        held = ((count >> level) & 1) == 1
        empty = (count & ((1 << level) - 1)) == 0
        joined = tl.where(empty, stack[level], stack[level] + total)
        total = tl.where(held, joined, total)
    return total


@triton.jit
def empty_stack(x, LEVELS: tl.constexpr):
    """Return a tuple of LEVELS tiles of zeros."""
    stack = (tl.zeros_like(x),)
    for _ in tl.static_range(LEVELS - 1):
        stack = stack + (tl.zeros_like(x),)
    return stack


@triton.jit(do_not_specialize=["skip"])
def encode(
    table,
    values,
    old,
    new,
    rows,
    keep,
    skip,
    blocks,
    row_bytes,
    scale_offset,
    codes_offset,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_NEW: tl.constexpr,
):
    """Encode value + keep * old of BLOCKS blocks of one owner, and write the error of the encoding."""
    owner = tl.program_id(1)
    owner = owner + (owner >= skip).to(tl.int32)
    index, exists, parameter, start, count = blocks_of(
        table, owner, tl.program_id(0) * BLOCKS, blocks, BLOCKS
    )
    lane, place = lanes_of(WIDTH, PARTS)
    inside = place[None, :, :] < count[:, None, None]
    elements = start[:, None, None] + place[None, :, :]
    x = corrected(values, old, keep, parameter, elements, inside, DTYPE, HAS_OLD)
    scale, codes, decoded = encode_blocks(x, count, KIND, WIDTH, PARTS)
    row = rows + owner.to(tl.int64) * row_bytes
    store_encoding(row, scale_offset, codes_offset, index, exists, scale, codes, lane, WIDTH // PARTS)
    if HAS_NEW:
        store_error(new, parameter, elements, inside, x - decoded)


@triton.jit(do_not_specialize=["rank", "world"])
def mean_encode(
    table,
    values,
    old,
    new,
    received,
    into,
    keep,
    rank,
    world,
    blocks,
    row_bytes,
    scale_offset,
    codes_offset,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_NEW: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Average own and received numbers of BLOCKS blocks of this rank, and encode the mean."""
    index, exists, parameter, start, count = blocks_of(table, rank, tl.program_id(0) * BLOCKS, blocks, BLOCKS)
    lane, place = lanes_of(WIDTH, PARTS)
    inside = place[None, :, :] < count[:, None, None]
    elements = start[:, None, None] + place[None, :, :]
    own = corrected(values, old, keep, parameter, elements, inside, DTYPE, HAS_OLD)
    stack = empty_stack(own, LEVELS)
    for number in range(world):
        sender = tl.full((), number, tl.int64)  # in the interpreter `number` is an int
        row = received + sender * row_bytes
        wanted = index < tl.where(sender == rank, 0, blocks)
        scale, codes = load_encoding(row, scale_offset, codes_offset, index, wanted, lane, WIDTH // PARTS)
        term = tl.where(sender == rank, own, decode_blocks(scale, codes, KIND, PARTS))
        stack = pushed(stack, term, sender, LEVELS)
    divisor = tl.full(own.shape, world, tl.float32)
    mean = tl.div_rn(popped(stack, world, LEVELS), divisor)
    # Padding decodes to other numbers than 0 in some kinds, and must not count in the block's magnitudes.
    mean = tl.where(inside, mean, 0.0)
    scale, codes, decoded = encode_blocks(mean, count, KIND, WIDTH, PARTS)
    store_encoding(into, scale_offset, codes_offset, index, exists, scale, codes, lane, WIDTH // PARTS)
    if HAS_NEW:
        # The owner feeds this error back through its own residual, which has a weight of 1 / world.
        store_error(new, parameter, elements, inside, (mean - decoded) * divisor)


@triton.jit
def decode(
    table,
    into,
    rows,
    flag,
    blocks,
    row_bytes,
    scale_offset,
    codes_offset,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decode BLOCKS blocks of one owner, and write 0 to the flag if one has a non-finite number."""
    owner = tl.program_id(1)
    index, _, parameter, start, count = blocks_of(table, owner, tl.program_id(0) * BLOCKS, blocks, BLOCKS)
    lane, place = lanes_of(WIDTH, PARTS)
    inside = place[None, :, :] < count[:, None, None]
    elements = start[:, None, None] + place[None, :, :]
    row = rows + owner.to(tl.int64) * row_bytes
    scale, codes = load_encoding(row, scale_offset, codes_offset, index, count > 0, lane, WIDTH // PARTS)
    x = decode_blocks(scale, codes, KIND, PARTS)
    address = tl.broadcast_to(tl.load(into + parameter)[:, None, None], elements.shape)
    tl.store(at(address, elements, DTYPE), narrowed(x, DTYPE), mask=inside)
    finite = tl.min(finite_scale(scale, KIND).to(tl.int32), axis=0)
    tl.store(flag, 0, mask=finite == 0)


@triton.jit
def exact_row(table, places, NUMBERS: tl.constexpr):
    """Return the parameter, elements, owner and places in the owner's row of this program's numbers."""
    entry = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, NUMBERS)
    inside = number < tl.load(table + entry * 3 + 2)
    parameter = tl.load(table + entry * 3)
    elements = tl.load(table + entry * 3 + 1) + number
    owner = tl.load(places + entry * 2)
    return parameter, elements, owner, tl.load(places + entry * 2 + 1) + number, inside


@triton.jit
def exact_at(row, exact_offset, numbers, DTYPE: tl.constexpr):
    """Return pointers to exact numbers of a row of bytes."""
    if DTYPE == "fp32":
        return (row + exact_offset).to(tl.pointer_type(tl.float32)) + numbers
    else:
        return (row + exact_offset).to(tl.pointer_type(tl.uint16)) + numbers


@triton.jit
def gather_exact(
    table,
    places,
    values,
    rows,
    row_bytes,
    exact_offset,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Copy up to NUMBERS numbers of a parameter to the row of their owner."""
    parameter, elements, owner, numbers, inside = exact_row(table, places, NUMBERS)
    address = tl.broadcast_to(tl.load(values + parameter), elements.shape)
    x = widened(tl.load(at(address, elements, DTYPE), mask=inside), DTYPE)
    target = exact_at(rows + owner * row_bytes, exact_offset, numbers, EXACT)
    tl.store(target, narrowed(x, EXACT), mask=inside)


@triton.jit(do_not_specialize=["rank", "world"])
def mean_exact(
    received,
    own,
    into,
    share,
    rank,
    world,
    exact,
    row_bytes,
    exact_offset,
    EXACT: tl.constexpr,
    NUMBERS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Sum NUMBERS exact numbers of all senders, each times `share`."""
    numbers = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = numbers < exact
    zero = 0.0 if EXACT == "fp32" else 0
    mine = widened(tl.load(exact_at(own, exact_offset, numbers, EXACT), mask=inside, other=zero), EXACT)
    stack = empty_stack(mine, LEVELS)
    for number in range(world):
        sender = tl.full((), number, tl.int64)  # in the interpreter `number` is an int
        source = exact_at(received + sender * row_bytes, exact_offset, numbers, EXACT)
        wanted = numbers < tl.where(sender == rank, 0, exact)
        theirs = widened(tl.load(source, mask=wanted, other=zero), EXACT)
        stack = pushed(stack, tl.where(sender == rank, mine, theirs) * share, sender, LEVELS)
    mean = narrowed(popped(stack, world, LEVELS), EXACT)
    tl.store(exact_at(into, exact_offset, numbers, EXACT), mean, mask=inside)


@triton.jit
def scatter_exact(
    table,
    places,
    into,
    rows,
    flag,
    row_bytes,
    exact_offset,
    DTYPE: tl.constexpr,
    EXACT: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Copy up to NUMBERS numbers from their owner's row, and write 0 to the flag if one is non-finite."""
    parameter, elements, owner, numbers, inside = exact_row(table, places, NUMBERS)
    zero = 0.0 if EXACT == "fp32" else 0
    source = exact_at(rows + owner * row_bytes, exact_offset, numbers, EXACT)
    x = widened(tl.load(source, mask=inside, other=zero), EXACT)
    address = tl.broadcast_to(tl.load(into + parameter), elements.shape)
    tl.store(at(address, elements, DTYPE), narrowed(x, DTYPE), mask=inside)
    most = tl.max(bits_of(x) & MAGNITUDE, axis=0)
    tl.store(flag, 0, mask=most >= INFINITE)
