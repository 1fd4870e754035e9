"""Launch the Triton kernels for each block's largest numbers (`codecs.topk.LargestEntries`).

Tables, addresses and rows are those of `launch`, and so are the launches: one per phase, for any number of
ranks. Numbers that are not encoded use `launch.gather_exact` and the functions after it.
"""

from dataclasses import dataclass

import torch

from thinwire.errors import OptionError
from thinwire.kernels.triton.launch import (
    DTYPES,
    NUMBERS,
    WIDEST,
    ExactNumbers,
    levels_of,
    power_of_two,
)

VALUES = {"int2": 2, "int4": 4, "int8": 8, "bf16": 0, "fp32": 0}
"""Bits of the codes of kept values, by the codec's `values`. 0 where values are sent as numbers."""


def supports(values: str, width: int, kept: int) -> bool:
    """Return whether there are kernels for blocks of this width. Use the torch codec where this is False.

    Args:
        values: Form of kept values.
        width: Numbers in a block.
        kept: Numbers that are kept of a block, at most a quarter. The unary vectors of more do not fit in
            registers.

    >>> supports("int2", 4096, 256), supports("int2", 8192, 512), supports("bf16", 64, 17)
    (True, False, False)
    """
    return values in VALUES and 8 <= width <= WIDEST and 1 <= kept <= width // 4


@dataclass(frozen=True, kw_only=True)
class Entries(ExactNumbers):
    """The layout of a row of bytes, equal for all owners.

    Args:
        values: Form of kept values: "int2", "int4", "int8", "bf16" or "fp32".
        width: Numbers in a block.
        kept: Numbers that are kept of a block.
        lower_bits: Bits of the lower part of a position, see `codecs.positions`.
        unary_bits: Bits of the unary vector of a block's positions.
        values_offset: First byte of the values, `kept` numbers per block, or of two bf16 per block.
        places_offset: First byte of the positions.
        codes_offset: First byte of the codes. Not used with values that are sent as numbers.

    Raises:
        OptionError: There is no kernel for the values and width, or a part does not start at a multiple of 8.
    """

    values: str
    width: int
    kept: int
    lower_bits: int
    unary_bits: int
    values_offset: int = 0
    places_offset: int
    codes_offset: int

    def __post_init__(self) -> None:
        if not supports(self.values, self.width, self.kept):
            raise OptionError(
                f"values={self.values!r} with width={self.width} and kept={self.kept} has no Triton kernel:"
                " ask `supports` first, and use the torch codec if it is False"
            )
        self.check_aligned("values_offset", "places_offset", "codes_offset")

    @property
    def tile(self) -> int:
        """Numbers of a block in a program's tile."""
        return power_of_two(self.width)

    @property
    def blocks_at_once(self) -> int:
        """Blocks of a program."""
        return max(1, NUMBERS // self.tile)

    @property
    def programs(self) -> int:
        """Programs for the blocks of an owner."""
        return -(-self.blocks // self.blocks_at_once)

    @property
    def warps(self) -> int:
        """Warps of a program: at most 16 numbers in a thread.

        With 8 of them there would be two threads for each, with half the registers, too few to decode.
        """
        return max(4, self.tile // 512)

    @property
    def entries_bytes(self) -> int:
        """Bytes of scratch memory for a program's entries: a word for each, and a byte for each unary bit."""
        return -(-self.blocks_at_once * (4 * self.kept + self.unary_bits) // 16) * 16

    @property
    def dense_bytes(self) -> int:
        """Bytes of scratch memory for a program's decoded numbers."""
        return 4 * self.blocks_at_once * self.tile

    @property
    def constants(self) -> dict[str, int | str]:
        """The options that all kernels take."""
        return {
            "WIDTH": self.width,
            "KEPT": self.kept,
            "VALUES": self.values,
            "LOWER": self.lower_bits,
            "UNARY": self.unary_bits,
            "CODE": VALUES[self.values],
            "TILE": self.tile,
            "BLOCKS": self.blocks_at_once,
            "num_warps": self.warps,
            "enable_fp_fusion": False,
        }

    @property
    def _offsets(self) -> tuple[int, ...]:
        return self.row_bytes, self.values_offset, self.places_offset, self.codes_offset


def encode(
    entries: Entries,
    table: torch.Tensor,
    values: torch.Tensor,
    value_dtype: torch.dtype,
    old: torch.Tensor | None,
    keep: float,
    new: torch.Tensor | None,
    rows: torch.Tensor,
    skip: int,
) -> None:
    """Encode value + keep * old of the blocks of all owners but one, and write the error of the encoding.

    Args:
        entries: The layout of a row.
        table: All blocks.
        values: Addresses of the numbers to encode.
        value_dtype: Their dtype: float32, bfloat16 or float16.
        old: Addresses of float32 residuals to add, or None.
        keep: Factor of the residuals.
        new: Addresses of float32 tensors to write x - decoded to, or None. They may be the values or `old`.
        rows: uint8 [W, row_bytes]. Values, positions and codes are overwritten.
        skip: The owner whose blocks are not encoded, because it is this rank. -1 to encode all.
    """
    from thinwire.kernels.triton import topk

    owners = rows.shape[0] - (0 <= skip < rows.shape[0])
    if not owners or not entries.blocks:
        return
    topk.encode[(entries.programs, owners)](
        table,
        values,
        values if old is None else old,
        values if new is None else new,
        rows,
        _scratch(rows, owners * entries.programs * entries.entries_bytes),
        float(keep),
        skip if 0 <= skip < rows.shape[0] else rows.shape[0],
        entries.blocks,
        *entries._offsets,
        entries.entries_bytes,
        DTYPE=DTYPES[value_dtype],
        HAS_OLD=old is not None,
        HAS_NEW=new is not None,
        **entries.constants,
    )


def mean_encode(
    entries: Entries,
    table: torch.Tensor,
    values: torch.Tensor,
    value_dtype: torch.dtype,
    old: torch.Tensor | None,
    keep: float,
    new: torch.Tensor | None,
    received: torch.Tensor,
    rank: int,
    world: int,
    row: torch.Tensor,
) -> None:
    """Average this rank's own numbers and the received encodings of its blocks, and encode the mean.

    Args:
        entries: The layout of a row.
        table: All blocks.
        values: Addresses of this rank's numbers, which enter the mean without being encoded.
        value_dtype: Their dtype.
        old: Addresses of float32 residuals to add, or None.
        keep: Factor of the residuals.
        new: Addresses of float32 tensors to write (mean - decoded) * world to, or None.
        received: uint8 [W, row_bytes], the row of each sender for this owner. Row `rank` is not read.
        rank: This rank, the owner.
        world: Number of senders, and divisor of the sum. At most 512.
        row: uint8 [row_bytes]. Values, positions and codes are overwritten.
    """
    from thinwire.kernels.triton import topk

    levels = levels_of(world)
    if not entries.blocks:
        return
    room = levels * entries.dense_bytes + entries.entries_bytes  # all levels of sums but the lowest
    topk.mean_encode[(entries.programs,)](
        table,
        values,
        values if old is None else old,
        values if new is None else new,
        received,
        row,
        _scratch(row, entries.programs * room),
        float(keep),
        rank,
        world,
        entries.blocks,
        *entries._offsets,
        room,
        DTYPE=DTYPES[value_dtype],
        HAS_OLD=old is not None,
        HAS_NEW=new is not None,
        LEVELS=levels,
        **entries.constants,
    )


def decode(
    entries: Entries,
    table: torch.Tensor,
    into: torch.Tensor,
    into_dtype: torch.dtype,
    rows: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    """Decode the blocks of all owners.

    Args:
        entries: The layout of a row.
        table: All blocks.
        into: Addresses of the tensors to write to.
        into_dtype: Their dtype. Numbers are rounded to nearest, ties to even.
        rows: uint8 [W, row_bytes].
        flag: int32 [1]. Set to 0 if a block has a non-finite number, by the rule of the codec's `finite`, and
            otherwise unchanged. Initialise it to 1.
    """
    from thinwire.kernels.triton import topk

    if not entries.blocks:
        return
    topk.decode[(entries.programs, rows.shape[0])](
        table,
        into,
        rows,
        flag,
        entries.blocks,
        *entries._offsets,
        DTYPE=DTYPES[into_dtype],
        **entries.constants,
    )


def mean_decode(
    entries: Entries,
    table: torch.Tensor,
    into: torch.Tensor,
    into_dtype: torch.dtype,
    rows: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    """Average the same blocks of all senders, added in the order of ranks.

    Args:
        entries: The layout of a row.
        table: The blocks, as of one owner.
        into: Addresses of the tensors to write to.
        into_dtype: Their dtype. Means are rounded to nearest, ties to even.
        rows: uint8 [W, row_bytes], the row of each sender.
        flag: int32 [1]. Set to 0 if a mean is non-finite in float32, and otherwise unchanged. Initialise it
            to 1.
    """
    from thinwire.kernels.triton import topk

    if not entries.blocks:
        return
    topk.mean_decode[(entries.programs,)](
        table,
        into,
        rows,
        flag,
        _scratch(rows, entries.programs * entries.dense_bytes),
        rows.shape[0],
        entries.blocks,
        *entries._offsets,
        entries.dense_bytes,
        DTYPE=DTYPES[into_dtype],
        **entries.constants,
    )


def _scratch(like: torch.Tensor, count: int) -> torch.Tensor:
    """Return uninitialised bytes on a tensor's device.

    They may be freed after the launch: the allocator reuses memory in the order of the stream.
    """
    return torch.empty(count, dtype=torch.uint8, device=like.device)
