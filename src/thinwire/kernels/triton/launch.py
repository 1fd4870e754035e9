"""Launch the Triton kernels of a two-shot exchange: six launches per bucket, for up to 512 ranks.

A bucket's encoded numbers are cut into blocks of `width` numbers. Each of the W ranks owns the same number of
consecutive blocks. All tensors are on one device:

    table    int64 [W * blocks, 3]   parameter, first element, and count of each block. Row o * blocks + i is
                                     block i of owner o. The count is less than the width in the last block of
                                     a parameter, and 0 in unused blocks.
    values   int64 [P]               the address (`data_ptr`) of each parameter's contiguous tensor. `old`,
                                     `new` and `into` likewise.
    rows     uint8 [W, row_bytes]    an owner's scales (float32), codes and exact numbers, see `Geometry`.

Exact numbers have a table [E, 3] of (parameter, first element, count up to 1024), and `places` [E, 2] of
(owner, offset in numbers within the owner's exact part).

The arithmetic is that of `thinwire.kernels.blocks`, except that the terms of a mean are added in a pairwise
tree in the order of ranks: ((0 + 1) + (2 + 3)) + 4.
"""

import functools
import importlib.util
from dataclasses import dataclass

import torch

from thinwire.errors import OptionError
from thinwire.kernels import library
from thinwire.kernels.blocks import KINDS

NUMBERS = 1024
"""Numbers of a program. With four warps a thread holds eight of them, so that a stack of ten sums fits."""

DEVICES = ("cuda", "xpu")
"""The devices that Triton compiles for. torch calls ROCm's "cuda" too."""

MOST_RANKS = 512
WIDEST = 4096
"""Numbers in the widest block that a program holds."""

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The dtypes of numbers, by the names that kernels have for them."""


def available(device: torch.device) -> bool:
    """Return whether kernels are launched on this device: it is a GPU, and `status` is in use."""
    return device.type in DEVICES and status().in_use


def status() -> library.Status:
    """Return whether kernels are launched on GPUs, and if not, why."""
    if found := library.off():
        return found
    if not _installed():
        detail = "Triton is not installed, so codecs run on torch's operators, with many launches"
        return library.Status(False, detail, "pip install triton (torch for CUDA brings it along)")
    return library.Status(True, "Triton is installed")


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def supports(kind: str, width: int) -> bool:
    """Return whether there are kernels for blocks of this width.

    Tiles of a GPU are powers of two. Blocks of other widths are masked, except those of "sign" and "int2",
    whose sums would need another order. Use the torch codec where this is False.

    Args:
        kind: A kind of `thinwire.kernels.blocks.KINDS`.
        width: Numbers in a block.

    >>> supports("int8", 136), supports("sign", 136), supports("sign", 128)
    (True, False, True)
    """
    if kind not in KINDS or width % 8 or not 8 <= width <= WIDEST:
        return False
    return kind not in ("sign", "int2") or width & (width - 1) == 0


@dataclass(frozen=True, kw_only=True)
class ExactNumbers:
    """The part of a row's layout that does not depend on the encoding.

    Args:
        blocks: Blocks of an owner.
        row_bytes: Bytes of a row.
        exact_offset: First byte of the exact numbers.
        exact: Exact numbers of a row.
    """

    blocks: int
    row_bytes: int
    exact_offset: int
    exact: int

    def check_aligned(self, *offsets: str) -> None:
        """Raise OptionError unless these offsets, and those of every row, are multiples of 8."""
        for name in ("row_bytes", "exact_offset", *offsets):
            value = getattr(self, name)
            if value % 8 or value < 0:
                raise OptionError(f"{name}={value} must be a multiple of 8: GPUs read aligned numbers only")


@dataclass(frozen=True, kw_only=True)
class Geometry(ExactNumbers):
    """The layout of a row of bytes, equal for all owners.

    Args:
        kind: The encoding of blocks.
        width: Numbers in a block.
        scale_offset: First byte of the scales, one float32 per block.
        codes_offset: First byte of the codes, width * bits / 8 bytes per block.

    Raises:
        OptionError: There is no kernel for the kind and width, or a part does not start at a multiple of 8.
    """

    kind: str
    width: int
    scale_offset: int = 0
    codes_offset: int

    def __post_init__(self) -> None:
        if not supports(self.kind, self.width):
            raise OptionError(
                f"kind={self.kind!r} with width={self.width} has no Triton kernel: ask `supports` first, and"
                " use the torch codec if it is False"
            )
        self.check_aligned("scale_offset", "codes_offset")

    @property
    def parts(self) -> int:
        """Numbers in a byte of codes."""
        return 8 // KINDS[self.kind][1]

    @property
    def tile(self) -> int:
        """Numbers of a block in a program's tile."""
        return self.parts * power_of_two(self.width // self.parts)

    @property
    def blocks_at_once(self) -> int:
        """Blocks of a program."""
        return max(1, NUMBERS // self.tile)

    @property
    def warps(self) -> int:
        """Warps of a program. No number of a tile may be in two threads.

        Each thread loads its numbers before it stores their errors, which may have the same address. A second
        thread with the same number could load it after that.
        """
        return max(4, self.tile // 256)


def encode(
    geometry: Geometry,
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
        geometry: The layout of a row.
        table: All blocks.
        values: Addresses of the numbers to encode.
        value_dtype: Their dtype: float32, bfloat16 or float16.
        old: Addresses of float32 residuals to add, or None.
        keep: Factor of the residuals.
        new: Addresses of float32 tensors to write x - decoded to, or None. They may be the values or `old`.
        rows: uint8 [W, row_bytes]. Scales and codes are overwritten. Unused blocks get a scale of 0.
        skip: The owner whose blocks are not encoded, because it is this rank.
    """
    from thinwire.kernels.triton import twoshot

    owners = rows.shape[0] - (0 <= skip < rows.shape[0])
    if not owners or not geometry.blocks:
        return
    twoshot.encode[(-(-geometry.blocks // geometry.blocks_at_once), owners)](
        table,
        values,
        values if old is None else old,
        values if new is None else new,
        rows,
        float(keep),
        skip if 0 <= skip < rows.shape[0] else rows.shape[0],
        geometry.blocks,
        geometry.row_bytes,
        geometry.scale_offset,
        geometry.codes_offset,
        KIND=geometry.kind,
        WIDTH=geometry.width,
        PARTS=geometry.parts,
        BLOCKS=geometry.blocks_at_once,
        DTYPE=DTYPES[value_dtype],
        HAS_OLD=old is not None,
        HAS_NEW=new is not None,
        num_warps=geometry.warps,
        enable_fp_fusion=False,
    )


def mean_encode(
    geometry: Geometry,
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
        geometry: The layout of a row.
        table: All blocks.
        values: Addresses of this rank's numbers, which enter the mean without being encoded.
        value_dtype: Their dtype.
        old: Addresses of float32 residuals to add, or None.
        keep: Factor of the residuals.
        new: Addresses of float32 tensors to write (mean - decoded) * world to, or None.
        received: uint8 [W, row_bytes], the row of each sender for this owner. Row `rank` is not read.
        rank: This rank, the owner.
        world: Number of senders, and divisor of the sum. At most 512.
        row: uint8 [row_bytes]. Scales and codes are overwritten.
    """
    from thinwire.kernels.triton import twoshot

    levels = levels_of(world)
    if not geometry.blocks:
        return
    twoshot.mean_encode[(-(-geometry.blocks // geometry.blocks_at_once),)](
        table,
        values,
        values if old is None else old,
        values if new is None else new,
        received,
        row,
        float(keep),
        rank,
        world,
        geometry.blocks,
        geometry.row_bytes,
        geometry.scale_offset,
        geometry.codes_offset,
        KIND=geometry.kind,
        WIDTH=geometry.width,
        PARTS=geometry.parts,
        BLOCKS=geometry.blocks_at_once,
        DTYPE=DTYPES[value_dtype],
        HAS_OLD=old is not None,
        HAS_NEW=new is not None,
        LEVELS=levels,
        num_warps=geometry.warps,
        enable_fp_fusion=False,
    )


def decode(
    geometry: Geometry,
    table: torch.Tensor,
    into: torch.Tensor,
    into_dtype: torch.dtype,
    rows: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    """Decode the blocks of all owners.

    Args:
        geometry: The layout of a row.
        table: All blocks.
        into: Addresses of the tensors to write to.
        into_dtype: Their dtype. Numbers are rounded to nearest, ties to even.
        rows: uint8 [W, row_bytes].
        flag: int32 [1]. Set to 0 if a block has a non-finite number, by the rule of the codec's `finite`, and
            otherwise unchanged. Initialise it to 1.
    """
    from thinwire.kernels.triton import twoshot

    if not geometry.blocks:
        return
    twoshot.decode[(-(-geometry.blocks // geometry.blocks_at_once), rows.shape[0])](
        table,
        into,
        rows,
        flag,
        geometry.blocks,
        geometry.row_bytes,
        geometry.scale_offset,
        geometry.codes_offset,
        KIND=geometry.kind,
        WIDTH=geometry.width,
        PARTS=geometry.parts,
        BLOCKS=geometry.blocks_at_once,
        DTYPE=DTYPES[into_dtype],
        num_warps=geometry.warps,
        enable_fp_fusion=False,
    )


def gather_exact(
    geometry: ExactNumbers,
    table: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    value_dtype: torch.dtype,
    exact_dtype: torch.dtype,
    rows: torch.Tensor,
) -> None:
    """Copy exact numbers to the rows of their owners.

    Args:
        geometry: The layout of a row.
        table: int64 [E, 3], the exact numbers.
        places: int64 [E, 2], their owners and offsets.
        values: Addresses of the numbers.
        value_dtype: Their dtype.
        exact_dtype: Dtype of exact numbers in a row. Numbers are rounded to nearest, ties to even.
        rows: uint8 [W, row_bytes]. The exact part is overwritten, that of this rank too.
    """
    from thinwire.kernels.triton import twoshot

    if not len(table):
        return
    twoshot.gather_exact[(len(table),)](
        table,
        places,
        values,
        rows,
        geometry.row_bytes,
        geometry.exact_offset,
        DTYPE=DTYPES[value_dtype],
        EXACT=DTYPES[exact_dtype],
        NUMBERS=NUMBERS,
        enable_fp_fusion=False,
    )


def mean_exact(
    geometry: ExactNumbers,
    exact_dtype: torch.dtype,
    received: torch.Tensor,
    own: torch.Tensor,
    rank: int,
    world: int,
    row: torch.Tensor,
) -> None:
    """Average the exact numbers of this rank and of the received rows, each times float32(1 / world).

    Args:
        geometry: The layout of a row.
        exact_dtype: Dtype of exact numbers in a row.
        received: uint8 [W, row_bytes], the row of each sender for this owner. Row `rank` is not read.
        own: uint8 [row_bytes], this rank's row for itself, from `gather_exact`.
        rank: This rank, the owner.
        world: Number of senders. At most 512.
        row: uint8 [row_bytes]. The exact part is overwritten. It may be `own`.
    """
    from thinwire.kernels.triton import twoshot

    levels = levels_of(world)
    if not geometry.exact:
        return
    twoshot.mean_exact[(-(-geometry.exact // NUMBERS),)](
        received,
        own,
        row,
        1.0 / world,
        rank,
        world,
        geometry.exact,
        geometry.row_bytes,
        geometry.exact_offset,
        EXACT=DTYPES[exact_dtype],
        NUMBERS=NUMBERS,
        LEVELS=levels,
        enable_fp_fusion=False,
    )


def scatter_exact(
    geometry: ExactNumbers,
    table: torch.Tensor,
    places: torch.Tensor,
    into: torch.Tensor,
    into_dtype: torch.dtype,
    exact_dtype: torch.dtype,
    rows: torch.Tensor,
    flag: torch.Tensor,
) -> None:
    """Copy exact numbers from the rows of their owners.

    Args:
        geometry: The layout of a row.
        table: int64 [E, 3], the exact numbers.
        places: int64 [E, 2], their owners and offsets.
        into: Addresses of the tensors to write to.
        into_dtype: Their dtype.
        exact_dtype: Dtype of exact numbers in a row.
        rows: uint8 [W, row_bytes].
        flag: int32 [1]. Set to 0 if an exact number is non-finite, and otherwise unchanged.
    """
    from thinwire.kernels.triton import twoshot

    if not len(table):
        return
    twoshot.scatter_exact[(len(table),)](
        table,
        places,
        into,
        rows,
        flag,
        geometry.row_bytes,
        geometry.exact_offset,
        DTYPE=DTYPES[into_dtype],
        EXACT=DTYPES[exact_dtype],
        NUMBERS=NUMBERS,
        enable_fp_fusion=False,
    )


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def levels_of(world: int) -> int:
    """Return the levels of a stack of partial sums."""
    if not 1 <= world <= MOST_RANKS:
        raise OptionError(
            f"world={world} must be from 1 to {MOST_RANKS}: a stack of more sums fills registers"
        )
    return world.bit_length()
