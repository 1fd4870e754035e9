"""One bucket's two-shot exchange, by the kernels and by the torch codecs: the numbers that differ."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.codecs.codec import BlockCodec, Parts
from thinwire.codecs.float8 import Float8
from thinwire.codecs.magnitudes import SMALLEST
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.sign import SignBits
from thinwire.codecs.two_magnitudes import TwoMagnitudes
from thinwire.kernels.blocks import bits_of
from thinwire.kernels.triton import launch

KINDS = ("int8", "int4", "sign", "e4m3", "e5m2", "int2")


def codec_of(kind: str, width: int) -> BlockCodec:
    if kind in ("int8", "int4"):
        return Quantize(bits=int(kind[3:]), block=width)
    if kind == "sign":
        return SignBits(block=width)
    if kind == "int2":
        return TwoMagnitudes(block=width)
    return Float8(variant="e4m3" if kind == "e4m3" else "e5m2", block=width)


def nasty(count: int, width: int, seed: int) -> torch.Tensor:
    """Return numbers at the edges of float32, each kind in one block after the other."""
    draw = torch.Generator().manual_seed(seed)
    largest = torch.finfo(torch.float32).max

    def normal() -> torch.Tensor:
        return torch.randn(width, generator=draw)

    def blocks() -> Iterator[torch.Tensor]:
        while True:
            yield normal()
            yield torch.exp((torch.rand(width, generator=draw) - 0.5) * 170) * normal().sign()
            yield torch.randint(-(2**31), 2**31, (width,), generator=draw).to(torch.int32).view(torch.float32)
            yield normal() * 1e-40
            yield normal() * 1e-33
            yield normal().clamp(-1, 1) * largest
            yield torch.full((width,), largest)
            yield torch.zeros(width).copysign(normal())
            yield torch.where(torch.rand(width, generator=draw) < 0.03, float("inf"), normal())
            yield torch.where(torch.rand(width, generator=draw) < 0.03, float("nan"), normal())
            # Ties of integers, and of two magnitudes: numbers that are halves of the largest code.
            for most in (127, 7, 448):
                halves = torch.randint(-2 * most, 2 * most + 1, (width,), generator=draw) / 2
                halves[int(torch.randint(width, (), generator=draw))] = most
                yield halves
            yield torch.full((width,), 1.1).copysign(normal())
            yield torch.where(torch.rand(width, generator=draw) < 0.9, 0.0, normal())
            yield normal() * 2.0 ** torch.randint(-12, 12, (width,), generator=draw)

    source = blocks()
    return torch.cat([next(source) for _ in range(-(-count // width))])[:count]


def tame(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@dataclass
class Tally:
    """Numbers compared and differing, by kernel."""

    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)

    def add(
        self, kernel: str, expected: torch.Tensor, found: torch.Tensor, loose: torch.Tensor | None = None
    ) -> None:
        """Compare bits. All NaN are equal. Where `loose`, numbers need only be non-finite on both sides."""
        assert expected.shape == found.shape, (kernel, expected.shape, found.shape)
        assert expected.dtype == found.dtype, (kernel, expected.dtype, found.dtype)
        if expected.is_floating_point():
            whole = {2: torch.int16, 4: torch.int32}[expected.element_size()]
            equal = expected.contiguous().view(whole) == found.contiguous().view(whole)
            equal |= expected.isnan() & found.isnan()
            if loose is not None:
                equal |= loose & ~expected.isfinite() & ~found.isfinite()
        else:
            equal = expected == found
            if loose is not None:
                equal |= loose
        self.compared[kernel] = self.compared.get(kernel, 0) + equal.numel()
        self.differing[kernel] = self.differing.get(kernel, 0) + int((~equal).sum())


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A bucket of several parameters whose last blocks are short, and what is done with it."""

    kind: str
    width: int = 256
    world: int = 3
    rank: int = 1
    dtype: torch.dtype = torch.float32
    exact_dtype: torch.dtype = torch.float32
    keep: float | None = 0.9
    alias: bool = False
    hard: bool = True
    blocks: int = 16
    fill: int = 8

    @property
    def lengths(self) -> list[int]:
        """Lengths of the parameters: one number, whole blocks, less and more than a block."""
        width = self.width
        return [1, self.blocks * width, width - 1, 3 * width + 5, 2 * width]

    def numbers(self, seed: int) -> list[torch.Tensor]:
        draw = nasty if self.hard else tame
        return [draw(n, self.width, 100 * seed + i) for i, n in enumerate(self.lengths)]

    def counts(self) -> list[tuple[int, int, int]]:
        """Return parameter, start and count of all blocks."""
        return [
            (parameter, start, min(self.width, length - start))
            for parameter, length in enumerate(self.lengths)
            for start in range(0, length, self.width)
        ]

    @property
    def owned(self) -> int:
        return -(-len(self.counts()) // self.world)

    @property
    def kernels(self) -> Any:
        """The module with `encode`, `mean_encode` and `decode`."""
        return launch

    def reference(self) -> "Reference":
        return Reference(self)

    def parts(self) -> list[tuple[int, int, torch.dtype]]:
        """Return first byte, numbers per block and dtype of each part of a row."""
        g = self.geometry()
        return [(g.scale_offset, 1, torch.float32), (g.codes_offset, g.width // g.parts, torch.uint8)]

    def geometry(self) -> Any:
        codes = self.owned * self.width * bits_of(self.kind) // 8
        exact = 2 * 1024 + 7
        start = -(-4 * self.owned // self.fill) * self.fill
        after = start + -(-codes // self.fill) * self.fill
        return launch.Geometry(
            kind=self.kind,
            width=self.width,
            blocks=self.owned,
            row_bytes=after + -(-exact * self.exact_dtype.itemsize // self.fill) * self.fill,
            codes_offset=start,
            exact_offset=after,
            exact=exact,
        )


class Reference:
    """The torch codec on the blocks of an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.codec = codec_of(exchange.kind, exchange.width)
        self.table = exchange.counts()
        self.table += [(0, 0, 0)] * (exchange.owned * exchange.world - len(self.table))
        self.inside = torch.tensor([[i < count for i in range(exchange.width)] for _, _, count in self.table])

    def blocks_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the blocks of tensors as rows, padded with zeros."""
        blocks = torch.zeros(len(self.table), self.exchange.width)
        for row, (parameter, start, count) in enumerate(self.table):
            blocks[row, :count] = tensors[parameter][start : start + count]
        return blocks

    def encode(self, x: torch.Tensor, rows: slice) -> tuple[Parts, torch.Tensor]:
        """Return scales and codes as bytes, and decoded numbers."""
        parts = [part.clone() for part in self.codec.encode_blocks(x)]
        for row, (_, _, count) in enumerate(self.table[rows]):
            if 0 < count < self.exchange.width:
                self.codec.correct_padded(tuple(part[row] for part in parts), count, self.exchange.width)
        if parts[1].is_floating_point():  # int8, of which NaN has none
            parts[1] = parts[1].nan_to_num().clamp(-127, 127).to(torch.int8)
        decoded = torch.empty_like(x)
        self.codec.decode_blocks(tuple(parts), decoded)
        return (parts[0], parts[1].view(torch.uint8)), decoded

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        scales, codes = parts
        out = torch.empty(len(scales), self.exchange.width)
        dtype = torch.int8 if self.exchange.kind in ("int8", "int4") else torch.uint8
        self.codec.decode_blocks((scales, codes.view(dtype)), out)
        return out

    def overflowed(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the blocks whose codes are arbitrary, because their scale is non-finite.

        A NaN has no integer, and processors differ in the sign of a NaN that they compute.
        """
        return ~scales.isfinite()


def tree_sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """Add adjacent pairs until one is left."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + (terms[-1:] if len(terms) % 2 else [])
    return terms[0]


class Run:
    """The exchange by the kernels, on tensors with guards that no kernel may overwrite."""

    def __init__(self, exchange: Exchange, *, checked: bool = True) -> None:
        self.exchange, self.geometry, self.checked = exchange, exchange.geometry(), checked
        self.reference = exchange.reference()
        self.table = torch.tensor(self.reference.table)
        self.tally = Tally()
        self.kept: list[torch.Tensor] = [self.table]

    def addresses(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        table = torch.tensor([tensor.data_ptr() for tensor in tensors])
        self.kept += [*tensors, table]
        return table

    def rows(self, world: int) -> torch.Tensor:
        rows = torch.full((world, self.geometry.row_bytes), 0xA5, dtype=torch.uint8)
        self.kept.append(rows)
        return rows

    def parts_of(self, rows: torch.Tensor) -> Parts:
        """Return the parts of rows of bytes, one block per row."""
        return tuple(
            rows[:, start : start + self.geometry.blocks * width * dtype.itemsize]
            .contiguous()
            .view(dtype)
            .view(-1, width)
            for start, width, dtype in self.exchange.parts()
        )

    def fill_rows(self, rows: torch.Tensor, parts: Parts) -> None:
        for (start, _, _), part in zip(self.exchange.parts(), parts, strict=True):
            written = part.reshape(rows.shape[0], -1).view(torch.uint8)
            rows[:, start : start + written.shape[1]] = written

    def inputs(self, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor]]:
        """Return values in the exchange's dtype, residuals, and x = value + keep * residual."""
        e = self.exchange
        values = [x.to(e.dtype) for x in e.numbers(seed)]
        if e.keep is None:
            return values, None, [x.float().clone() for x in values]  # values may be overwritten
        old = [0.01 * x for x in e.numbers(seed + 1)]
        return (
            values,
            old,
            [value.float() + residual * e.keep for value, residual in zip(values, old, strict=True)],
        )

    def compare_parts(self, kernel: str, expected: Parts, found: Parts, used: torch.Tensor) -> torch.Tensor:
        """Compare the used blocks, and return which have arbitrary codes."""
        loose = self.reference.overflowed(expected[0])  # one column
        for wanted, part in zip(expected, found, strict=True):
            self.tally.add(kernel, wanted[used], part[used], loose.expand_as(wanted)[used])
        unused = found[0][~used]
        assert not self.checked or (unused <= SMALLEST).all(), "the scale of an unused block is not of zeros"
        return loose

    def compare_errors(
        self,
        kernel: str,
        before: list[torch.Tensor],
        new: list[torch.Tensor],
        error: torch.Tensor,
        where: torch.Tensor,
        loose: torch.Tensor,
    ) -> None:
        """Compare the errors of the blocks that a kernel encoded. Others must be as before."""
        ref = self.reference
        found = ref.blocks_of(new)
        inside = ref.inside & where
        self.tally.add(kernel, error[inside], found[inside], loose.expand_as(error)[inside])
        outside = ref.inside & ~where
        untouched = Tally()
        untouched.add(kernel, ref.blocks_of(before)[outside], found[outside])
        assert not untouched.differing[kernel], "errors of blocks that were not encoded were overwritten"

    def targets(self, values: list[torch.Tensor], old: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Return tensors for errors: new ones, or, with aliasing, the residuals or values themselves."""
        if self.exchange.alias and old is not None:
            return old
        if self.exchange.alias and self.exchange.dtype is torch.float32:
            return values
        return [torch.full((n,), 7.0) for n in self.exchange.lengths]

    def encode(self) -> None:
        e, ref = self.exchange, self.reference
        values, old, x = self.inputs(1)
        expected, decoded = ref.encode(ref.blocks_of(x), slice(None))
        new = self.targets(values, old)
        before = [tensor.clone() for tensor in new]
        rows = self.rows(e.world)
        e.kernels.encode(
            self.geometry,
            self.table,
            self.addresses(values),
            e.dtype,
            None if old is None else self.addresses(old),
            1.0 if e.keep is None else e.keep,
            self.addresses(new),
            rows,
            e.rank,
        )
        assert (rows[e.rank] == 0xA5).all(), "the skipped row was overwritten"
        assert (rows[:, self.geometry.exact_offset :] == 0xA5).all(), "exact numbers were overwritten"
        others = torch.arange(len(ref.table)) // e.owned != e.rank
        found = self.parts_of(rows)
        used = ref.inside.any(1)
        # The skipped row was not written: compare as if it was right.
        found = tuple(torch.where(others[:, None], a, b) for a, b in zip(found, expected, strict=True))
        found[0][~used & ~others] = 0
        loose = self.compare_parts("encode", expected, found, used)
        self.compare_errors("encode", before, new, ref.blocks_of(x) - decoded, others[:, None], loose)

    def mean_encode(self) -> None:
        e, ref = self.exchange, self.reference
        own = slice(e.rank * e.owned, (e.rank + 1) * e.owned)
        values, old, x = self.inputs(3)
        received = self.rows(e.world)
        terms = []
        for sender in range(e.world):
            mine = ref.blocks_of(self.inputs(10 + sender)[2] if sender != e.rank else x)[own]
            parts, decoded = ref.encode(mine, own)
            if sender != e.rank:
                self.fill_rows(received[sender : sender + 1], parts)
            terms.append(mine if sender == e.rank else decoded)
        total = tree_sum(terms)
        mean = torch.where(ref.inside[own], total / total.new_full((), e.world), 0.0)
        expected, decoded = ref.encode(mean, own)
        new = self.targets(values, old)
        before = [tensor.clone() for tensor in new]
        row = self.rows(1)
        e.kernels.mean_encode(
            self.geometry,
            self.table,
            self.addresses(values),
            e.dtype,
            None if old is None else self.addresses(old),
            1.0 if e.keep is None else e.keep,
            self.addresses(new),
            received,
            e.rank,
            e.world,
            row[0],
        )
        assert (row[:, self.geometry.exact_offset :] == 0xA5).all(), "exact numbers were overwritten"
        used = ref.inside.any(1)[own]
        loose = self.compare_parts("mean_encode", expected, self.parts_of(row), used)
        error, where, everywhere = (
            torch.zeros(ref.inside.shape),
            torch.zeros(ref.inside.shape).bool(),
            ~ref.inside,
        )
        error[own], where[own], everywhere[own] = (mean - decoded) * e.world, True, loose
        self.compare_errors("mean_encode", before, new, error, where, everywhere)

    def decode(self) -> None:
        e, ref = self.exchange, self.reference
        parts, _ = ref.encode(ref.blocks_of(self.inputs(5)[2]), slice(None))
        used = ref.inside.any(1)
        parts[0][~used] = 0
        rows = self.rows(e.world)
        self.fill_rows(rows, parts)
        into, flag = [torch.full((n,), 7.0).to(e.dtype) for n in e.lengths], torch.ones(1, dtype=torch.int32)
        e.kernels.decode(self.geometry, self.table, self.addresses(into), e.dtype, rows, self.keep(flag))
        expected = ref.decode(*parts)
        found = [tensor.clone() for tensor in into]
        wanted = [torch.empty_like(tensor) for tensor in into]
        for row, (parameter, start, count) in enumerate(ref.table):
            wanted[parameter][start : start + count] = expected[row, :count].to(e.dtype)
        for a, b in zip(wanted, found, strict=True):
            self.tally.add("decode", a, b)
        finite = ref.codec.finite(tuple(part[used] for part in parts))
        assert finite is not None
        self.tally.add("decode", finite.int().view(1), flag)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.append(tensor)
        return tensor

    def exact(self) -> None:
        """Gather, average and scatter numbers that are not encoded, as many as fit in the rows."""
        e, g = self.exchange, self.geometry
        pieces = [
            (parameter, start, min(1024, length - start))
            for parameter, length in enumerate(e.lengths)
            for start in range(0, length, 1024)
        ][: 2 * e.world]
        places = [(number % e.world, number // e.world * 1024 + 3) for number in range(len(pieces))]
        table, where = self.keep(torch.tensor(pieces)), self.keep(torch.tensor(places))
        values = self.inputs(7)[0]
        rows, dtype = self.rows(e.world), e.exact_dtype
        launch.gather_exact(g, table, where, self.addresses(values), e.dtype, dtype, rows)
        into, flag = [torch.full((n,), 7.0).to(e.dtype) for n in e.lengths], torch.ones(1, dtype=torch.int32)
        launch.scatter_exact(g, table, where, self.addresses(into), e.dtype, dtype, rows, self.keep(flag))
        wanted = [torch.full_like(tensor, 7.0) for tensor in into]
        exact = rows[:, g.exact_offset : g.exact_offset + g.exact * dtype.itemsize].contiguous().view(dtype)
        finite = True
        for (parameter, start, count), (owner, offset) in zip(pieces, places, strict=True):
            sent = values[parameter][start : start + count].float().to(dtype)
            self.tally.add("gather_exact", sent, exact[owner, offset : offset + count])
            wanted[parameter][start : start + count] = sent.to(e.dtype)
            finite &= bool(sent.isfinite().all())
        for a, b in zip(wanted, into, strict=True):
            self.tally.add("scatter_exact", a, b)
        self.tally.add("scatter_exact", torch.tensor([int(finite)], dtype=torch.int32), flag)
        self.mean_exact()

    def mean_exact(self) -> None:
        e, g = self.exchange, self.geometry
        draw = nasty if e.hard else tame
        sent = [draw(g.exact, e.width, 50 + sender).to(e.exact_dtype) for sender in range(e.world)]
        received, own, row = self.rows(e.world), self.rows(1), self.rows(1)
        end = g.exact_offset + g.exact * e.exact_dtype.itemsize
        for sender, numbers in enumerate(sent):
            target = own[0] if sender == e.rank else received[sender]
            target[g.exact_offset : end] = numbers.view(torch.uint8)
        launch.mean_exact(g, e.exact_dtype, received, own[0], e.rank, e.world, row[0])
        share = torch.tensor(1.0 / e.world)
        expected = tree_sum([numbers.float() * share for numbers in sent]).to(e.exact_dtype)
        self.tally.add("mean_exact", expected, row[0, g.exact_offset : end].clone().view(e.exact_dtype))
        assert (row[0, : g.exact_offset] == 0xA5).all(), "codes were overwritten"
        assert (row[0, end:] == 0xA5).all(), "bytes after the exact numbers were overwritten"

    def all(self) -> Tally:
        self.encode()
        self.mean_encode()
        self.decode()
        self.exact()
        return self.tally
