"""The encodings of a whole bucket by Triton kernels: six launches, for up to 512 ranks.

Kernels read a table of the bucket's blocks, made once for a layout, and the addresses of its tensors.
No copy of the numbers is made, in float32 or otherwise.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from thinwire.codecs.codec import BlockCodec, numbers_of
from thinwire.codecs.positions import Positions
from thinwire.codecs.topk import LargestEntries
from thinwire.engine.pack import Layout
from thinwire.kernels.triton import launch, launch_topk
from thinwire.programs.block_coder import layout_of_blocks
from thinwire.programs.bucket_coder import BucketCoder, BucketNumbers, with_exact
from thinwire.programs.division import Division, Piece
from thinwire.programs.gather_coder import GatherCoder, WholeBucket
from thinwire.programs.matrix_coder import Places, Slot, places_of
from thinwire.programs.program import Bucket, Outcome

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs(codec: BlockCodec, width: int, bucket: Bucket) -> bool:
    """Return whether the kernels can encode a bucket, on this device and with these dtypes."""
    buffer = bucket.buffer
    if not _supported(codec, width) or bucket.world_size > launch.MOST_RANKS:
        return False
    # A fake tensor has no memory. Errors are written in float32.
    own, exact = buffer.dtype.to_real(), (bucket.exact_dtype or buffer.dtype).to_real()
    wide = own == torch.float32 or not (bucket.track_error or bucket.residuals)
    plain = type(buffer) is torch.Tensor and launch.available(buffer.device)
    return plain and own in _DTYPES and exact in _DTYPES and wide


def gathers(codec: LargestEntries, bucket: Bucket) -> bool:
    """Return whether the kernels can encode all of a bucket's numbers together, as `Gathered` does."""
    return runs(codec, codec.width(numbers_of(bucket.buffer).numel()), bucket)


def _supported(codec: BlockCodec, width: int) -> bool:
    if isinstance(codec, LargestEntries):
        return launch_topk.supports(codec.values, width, codec.kept(width))
    return codec.kernel is not None and launch.supports(codec.kernel, width)


class TritonCoder(BucketCoder):
    """Encodes the chunks of all owners with one kernel per phase. Use it where `runs` is true.

    Args:
        bucket: The gradients.
        codec: A codec of blocks with a kernel, or `LargestEntries`.
        width: Numbers in a block.
        division: The chunks.
    """

    def __init__(self, bucket: Bucket, codec: BlockCodec, width: int, division: Division) -> None:
        self._rank, self._world, self._device = bucket.rank, bucket.world_size, bucket.buffer.device
        self._numbers = BucketNumbers(bucket)
        self._dtype = self._numbers.values[0].dtype
        coded, exact = places_of(division.coded, width), places_of(division.exact, 1)
        encoding = layout_of_blocks(codec, width, (coded.length,), self._device)
        layout = with_exact(encoding, exact.length, bucket)
        self._exact_dtype = layout.dtypes[-1]
        self._kernels, self._geometry = _kernels(codec, width, layout)
        self._tables = _tables(coded, exact, width, self._world, self._device, _stream(self._device))
        old, errors = self._numbers.old, self._numbers.errors
        self._values = self._addresses(self._numbers.values)
        self._old = None if old is None else self._addresses(old)
        self._errors = None if errors is None else self._addresses(errors)

    def encode(self) -> torch.Tensor:
        """Add residuals, encode, and write new residuals, in one pass. Copy exact numbers in another."""
        rows = self._empty(self._world)
        numbers, tables, geometry = self._numbers, self._tables, self._geometry
        inputs = self._values, self._dtype, self._old, numbers.keep, self._errors
        self._kernels.encode(geometry, tables.blocks, *inputs, rows, self._rank)
        exact = tables.exact, tables.exact_places, self._values, self._dtype, self._exact_dtype
        launch.gather_exact(geometry, *exact, rows)
        self._own = rows[self._rank]
        return rows

    def encode_mean(self, received: torch.Tensor) -> torch.Tensor:
        """Decode, average with this rank's own numbers, and encode the mean, in one pass."""
        rank, world, row = self._rank, self._world, self._empty(1)[0]
        inputs = self._values, self._dtype, self._old, self._numbers.keep, self._errors
        self._kernels.mean_encode(self._geometry, self._tables.blocks, *inputs, received, rank, world, row)
        launch.mean_exact(self._geometry, self._exact_dtype, received, self._own, rank, world, row)
        del self._own  # and with it the rows that were sent
        return row

    def decode(self, encoded: torch.Tensor) -> Outcome:
        """Decode to the bucket, and find non-finite numbers on the way."""
        numbers, tables, geometry = self._numbers, self._tables, self._geometry
        exact = [slot.of(numbers.values) for slot in tables.exact_slots]
        into = self._addresses(numbers.for_means(exact))
        flag = torch.ones(1, dtype=torch.int32, device=self._device)
        self._kernels.decode(geometry, tables.blocks, into, self._dtype, encoded, flag)
        dtypes = self._dtype, self._exact_dtype
        launch.scatter_exact(geometry, tables.exact, tables.exact_places, into, *dtypes, encoded, flag)
        return numbers.outcome([flag.bool()[0]])

    def _addresses(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return _addresses_of(tensors, self._device)

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, self._geometry.row_bytes, dtype=torch.uint8, device=self._device)


class TritonGatherCoder(GatherCoder):
    """Encodes a whole bucket with one kernel, and averages all ranks' rows with another.

    Args:
        codec: The codec. Use it where `gathers` is true.
        bucket: The gradients.
    """

    def __init__(self, codec: LargestEntries, bucket: Bucket) -> None:
        self._whole = WholeBucket(bucket)
        numbers = self._whole.numbers
        self._device, self._dtype, length = numbers.device, numbers.dtype, numbers.numel()
        width = codec.width(length)
        layout = layout_of_blocks(codec, width, (length,), self._device)
        _, self._entries = _kernels(codec, width, with_exact(layout, 0, bucket))
        # One owner of all blocks, and one parameter: the bucket.
        share = (Piece(0, 0, length),)
        places, nothing = places_of((share,), width), places_of(((),), 1)
        self._table = _tables(places, nothing, width, 1, self._device, _stream(self._device)).blocks

    def encode(self) -> torch.Tensor:
        """Add residuals, and encode in one pass, which replaces the numbers by their error."""
        whole, entries = self._whole, self._entries
        whole.add_residuals()
        numbers = _addresses_of([whole.numbers], self._device)
        row = torch.empty(1, entries.row_bytes, dtype=torch.uint8, device=self._device)
        errors = numbers if whole.tracked else None
        launch_topk.encode(entries, self._table, numbers, self._dtype, None, 1.0, errors, row, -1)
        return row[0]

    def decode(self, received: torch.Tensor) -> Outcome:
        """Decode and average in one pass, and find non-finite numbers on the way."""
        mean = self._whole.room_for_mean()
        into = _addresses_of([numbers_of(mean)], self._device)
        flag = torch.ones(1, dtype=torch.int32, device=self._device)
        launch_topk.mean_decode(self._entries, self._table, into, self._dtype, received, flag)
        # A mean that is finite in float32 may not be so in half precision.
        return self._whole.outcome(mean, flag.bool()[0] if self._dtype == torch.float32 else None)


class _Tables(NamedTuple):
    """The tables of a layout, on the device, in the form of `launch`."""

    blocks: torch.Tensor
    exact: torch.Tensor
    exact_places: torch.Tensor
    exact_slots: tuple[Slot, ...]


def _kernels(codec: BlockCodec, width: int, layout: Layout) -> tuple[Any, Any]:
    """Return the module that launches a codec's kernels, and its description of a row."""
    *parts, exact = layout.offsets
    common = {
        "width": width,
        "blocks": layout.shapes[0][0],
        "row_bytes": layout.nbytes,
        "exact_offset": exact,
        "exact": layout.shapes[-1].numel(),
    }
    if not isinstance(codec, LargestEntries):
        assert codec.kernel is not None, "see `runs`"
        scales, codes = parts
        return launch, launch.Geometry(kind=codec.kernel, scale_offset=scales, codes_offset=codes, **common)
    places = Positions(width, codec.kept(width))
    return launch_topk, launch_topk.Entries(
        values=codec.values,
        kept=places.kept,
        lower_bits=places.lower_bits,
        unary_bits=places.unary_bits,
        values_offset=parts[0],
        places_offset=parts[1],
        codes_offset=parts[-1],
        **common,
    )


@lru_cache(maxsize=1024)
def _tables(
    coded: Places, exact: Places, width: int, world: int, device: torch.device, stream: int
) -> _Tables:
    blocks = torch.zeros(world * coded.length // width, 3, dtype=torch.int64, device="cpu")
    for slot in coded.slots:
        starts = torch.arange(slot.start, slot.stop, width, dtype=torch.int64, device="cpu")
        rows = blocks[slot.place // width :][: len(starts)]
        rows[:, 0], rows[:, 1] = slot.parameter, starts
        rows[:, 2] = (slot.stop - starts).clamp_(max=width)
    pieces: list[tuple[int, int, int]] = []
    places: list[tuple[int, int]] = []
    for slot in exact.slots:
        owner, offset = divmod(slot.place, exact.length)
        for start in range(slot.start, slot.stop, launch.NUMBERS):
            pieces.append((slot.parameter, start, min(launch.NUMBERS, slot.stop - start)))
            places.append((owner, offset + start - slot.start))
    numbers, owners = (
        _uploaded(torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), columns), device)
        for rows, columns in ((pieces, 3), (places, 2))
    )
    return _Tables(_uploaded(blocks, device), numbers, owners, exact.slots)


def _addresses_of(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    found = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return _addresses(found, device, _stream(device))


@lru_cache(maxsize=4096)
def _addresses(found: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """Return addresses on the device.

    New residuals take turns with the old ones in the same memory, so after the first steps nothing is copied.
    """
    return _uploaded(torch.tensor(found, dtype=torch.int64, device="cpu"), device)


def _uploaded(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a table to the device. The host does not wait, so only this stream may use the copy."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    """Return the current stream, by which cached tables are told apart."""
    if device.type == "cpu":  # Triton's interpreter, in tests
        return 0
    stream: int = torch.get_device_module(device).current_stream(device).stream_id
    return stream
