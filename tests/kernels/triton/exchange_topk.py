"""One bucket's exchange of each block's largest numbers, by the kernels and by the torch codec."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.kernels.triton.exchange import Exchange, Reference, Run, Tally
from thinwire.codecs.codec import Parts
from thinwire.codecs.positions import Positions
from thinwire.codecs.topk import LargestEntries, Values
from thinwire.kernels.triton import launch_topk

VALUES: tuple[Values, ...] = ("int2", "int4", "int8", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class SparseExchange(Exchange):
    """An exchange by `LargestEntries`. `kind` is the form of its values."""

    ratio: float = 1 / 16

    @property
    def kernels(self) -> Any:
        return launch_topk

    @property
    def codec(self) -> LargestEntries:
        values: Any = self.kind
        return LargestEntries(ratio=self.ratio, block=self.width, values=values)

    def reference(self) -> "SparseReference":
        return SparseReference(self)

    def shapes(self) -> list[tuple[int, torch.dtype]]:
        """Return numbers per block and dtype of each part."""
        parts = self.codec.encode_blocks(torch.zeros(1, self.width))
        return [(part.shape[1], part.dtype) for part in parts]

    def starts(self) -> list[int]:
        """Return the first byte of each part, and of the exact numbers."""
        starts = [0]
        for width, dtype in self.shapes():
            size = self.owned * width * dtype.itemsize
            starts.append(starts[-1] + -(-size // self.fill) * self.fill)
        return starts

    def parts(self) -> list[tuple[int, int, torch.dtype]]:
        return [(start, *shape) for start, shape in zip(self.starts(), self.shapes(), strict=False)]

    def geometry(self) -> launch_topk.Entries:
        places, exact = Positions(self.width, self.codec.kept(self.width)), 2 * 1024 + 7
        starts = self.starts()
        return launch_topk.Entries(
            values=self.kind,
            width=self.width,
            kept=places.kept,
            lower_bits=places.lower_bits,
            unary_bits=places.unary_bits,
            blocks=self.owned,
            places_offset=starts[1],
            codes_offset=starts[2],
            row_bytes=starts[-1] + -(-exact * self.exact_dtype.itemsize // self.fill) * self.fill,
            exact_offset=starts[-1],
            exact=exact,
        )


class SparseReference(Reference):
    """The torch codec on the blocks of an exchange."""

    def __init__(self, exchange: SparseExchange) -> None:
        super().__init__(exchange)
        self.codec = exchange.codec

    def encode(self, x: torch.Tensor, rows: slice) -> tuple[Parts, torch.Tensor]:
        parts = self.codec.encode_blocks(x)
        return parts, self.decode(*parts)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(parts[0]), self.exchange.width)
        self.codec.decode_blocks(parts, out)
        return out

    def overflowed(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the blocks with NaN. Their payloads differ by processor, and decide which are kept."""
        return ~scales.isfinite().all(1, keepdim=True)


class SparseRun(Run):
    """The exchange by the kernels, and the mean of whole buckets that `Gathered` takes."""

    def mean_decode(self) -> None:
        whole = replace(self.exchange, world=1, rank=0)
        own = SparseRun(whole)
        own.kept = self.kept  # the memory that the evaluator knows
        self.kept.append(own.table)
        ref, rows = own.reference, own.rows(self.exchange.world)
        total = torch.zeros(ref.inside.shape)
        for sender in range(len(rows)):
            parts, decoded = ref.encode(ref.blocks_of(self.inputs(20 + sender)[2]), slice(None))
            own.fill_rows(rows[sender : sender + 1], parts)
            total += decoded
        mean = total / total.new_full((), len(rows))
        into, flag = [torch.full((n,), 7.0).to(whole.dtype) for n in whole.lengths], torch.ones(1).int()
        launch_topk.mean_decode(
            own.geometry, own.table, own.addresses(into), whole.dtype, rows, own.keep(flag)
        )
        finite = True
        for row, (parameter, start, count) in enumerate(ref.table):
            finite &= bool(mean[row, :count].isfinite().all())
            found = into[parameter][start : start + count]
            self.tally.add("mean_decode", mean[row, :count].to(whole.dtype), found)
        self.tally.add("mean_decode", torch.tensor([int(finite)], dtype=torch.int32), flag)

    def all(self) -> Tally:
        super().all()
        self.mean_decode()
        return self.tally
