"""An evaluator of PTX: runs the compiled code of a Triton kernel on the CPU, by the rules of the PTX ISA.

All threads of all CTAs take each instruction together. So it checks arithmetic, masks, addresses, layouts in
shared memory and shuffles. A branch on which threads differ raises `DivergedError`. An access to global
memory whose order with another thread's no barrier determines raises `RaceError`. Barriers between accesses
to shared memory, which the compiler places, are not checked.

`.rn` operations are IEEE 754 single precision, as those of numpy are, and return the GPU's only NaN.
Operations whose bits the ISA leaves open (div.full, rcp.approx) raise `UnspecifiedError`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WARP = 32
_FULL = 0xFFFFFFFFFFFFFFFF
_NAN = np.uint32(0x7FFFFFFF)
_UNWRITTEN = 0xDEADBEEF5BADF00D
_NAMES = {"b": "u", "u": "u", "s": "i", "f": "f"}


class UnspecifiedError(Exception):
    """An instruction whose result the ISA does not define bit by bit."""


class DivergedError(Exception):
    """A branch that some threads take and others do not."""


class RaceError(Exception):
    """Two threads access the same byte, one of them writes, and no barrier is between them."""


@dataclass(frozen=True)
class Instruction:
    """An instruction: `@guard op.kinds operands`."""

    guard: str | None
    kinds: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def op(self) -> str:
        return ".".join(self.kinds)


class Region:
    """Bytes of a tensor, and the last accesses to each in a launch."""

    def __init__(self, data: Array) -> None:
        self.data = data

    # Made at the first access: a launch uses few of the tensors that exist.

    @cached_property
    def _written(self) -> "_Accesses":
        return _Accesses(len(self.data))

    @cached_property
    def _read(self) -> "_Accesses":
        return _Accesses(len(self.data))

    def note(self, index: Array, thread: Array, cta: Array, era: int, *, write: bool) -> None:
        """Record accesses by threads, `era` barriers after the start. Raise RaceError if one races."""
        self._written.check(index, thread, cta, era, across=not write)
        if write:
            self._read.check(index, thread, cta, era, across=False)
        (self._written if write else self._read).add(index, thread, cta, era)


class _Accesses:
    """The last access to each byte."""

    def __init__(self, count: int) -> None:
        self._thread, self._cta = np.full(count, -1), np.full(count, -1)
        self._era = np.full(count, -1)

    def check(self, index: Array, thread: Array, cta: Array, era: int, *, across: bool) -> None:
        """Raise RaceError if another thread of the CTA made the last access since the last barrier.

        No barrier is between CTAs. Two of them may write the same flag, and with `across` not read it.
        """
        same = self._cta[index] == cta
        raced = same & (self._era[index] == era) & (self._thread[index] != thread)
        if across:
            raced |= (self._cta[index] >= 0) & ~same
        if raced.any():
            raise RaceError(f"byte {int(index[raced][0])} of a tensor")

    def add(self, index: Array, thread: Array, cta: Array, era: int) -> None:
        self._thread[index], self._cta[index], self._era[index] = thread, cta, era


class Memory:
    """The tensors that a kernel may access, at their own addresses."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def add(self, address: int, data: Array) -> None:
        """Register bytes. An access outside of all registered bytes raises IndexError."""
        if data.size:
            self._regions[address] = Region(data)

    def load(self, addresses: Array, size: int, thread: Array, cta: Array, era: int) -> Array:
        values = np.zeros(addresses.shape, np.uint64)
        for chosen, region, index in self._split(addresses, size):
            region.note(index, thread[chosen], cta[chosen], era, write=False)
            for byte in range(size):
                values[chosen] |= region.data[index + byte].astype(np.uint64) << np.uint64(8 * byte)
        return values

    def store(self, addresses: Array, size: int, values: Array, thread: Array, cta: Array, era: int) -> None:
        for chosen, region, index in self._split(addresses, size):
            region.note(index, thread[chosen], cta[chosen], era, write=True)
            for byte in range(size):
                region.data[index + byte] = (values[chosen] >> np.uint64(8 * byte)).astype(np.uint8)

    def _split(self, addresses: Array, size: int) -> list[tuple[Array, Region, Array]]:
        """Return the accesses of each region: which they are, the region, and places in it."""
        starts = np.array(sorted(self._regions), np.uint64)
        which = np.searchsorted(starts, addresses, side="right") - 1
        accesses = []
        for number in np.unique(which):
            chosen = which == number
            region = self._regions[int(starts[max(number, 0)])]
            index = addresses[chosen].astype(np.int64) - int(starts[max(number, 0)])
            if number < 0 or index.max() + size > len(region.data):
                raise IndexError(f"{size} bytes at {int(addresses[chosen].max()):#x} belong to no tensor")
            accesses.append((chosen, region, index))
        return accesses


class Machine:
    """A compiled kernel that can be run on memory."""

    def __init__(self, text: str) -> None:
        entry = text.index(".entry")
        head, body = text[entry : text.index("\n{", entry)], text[text.index("\n{", entry) + 2 :]
        self._params = re.findall(r"\.param[^,\n]*?(\w+_param_\d+)", head)
        found = re.search(r"\.reqntid (\d+)", head)
        assert found is not None
        self._threads = int(found.group(1))
        self._code: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._parse(body)

    @property
    def ops(self) -> set[str]:
        """The operations of the kernel."""
        return {instruction.op for instruction in self._code}

    def _parse(self, body: str) -> None:
        for whole in body.split("\n"):
            line = whole.split("//")[0].strip()
            if whole.startswith("}"):
                break
            if label := re.match(r"(\$\w+):", line):
                self._labels[label.group(1)] = len(self._code)
                continue
            for statement in line.split(";"):
                self._append(statement.strip())

    def _append(self, statement: str) -> None:
        if not statement or statement in "{}" or statement.startswith("."):
            return
        found = re.fullmatch(r"(?:@(!?%p\d+)\s+)?([\w.:]+)\s*(.*)", statement)
        if found is None:
            raise NotImplementedError(statement)
        guard, op, rest = found.groups()
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]\s]+", rest)
        self._code.append(Instruction(guard, tuple(op.split(".")), tuple(operands)))

    def run(self, grid: Sequence[int], memory: Memory, arguments: Sequence[int | float]) -> None:
        """Run all CTAs of a grid. Arguments are addresses and numbers in the order of parameters."""
        x, y = (*grid, 1)[:2]
        self._count = x * y * self._threads
        number = np.arange(self._count, dtype=np.uint64)
        cta = number // np.uint64(self._threads)
        self._cta, self._thread, self._era = cta.astype(np.int64), number.astype(np.int64), 0
        self._registers: dict[str, Array] = {
            "%tid.x": number % np.uint64(self._threads),
            "%ctaid.x": cta % np.uint64(x),
            "%ctaid.y": cta // np.uint64(x),
            "%nctaid.x": np.full(self._count, x, np.uint64),
            "global_smem": np.zeros(self._count, np.uint64),
        }
        self._memory = memory
        self._shared = np.zeros((x * y, 1 << 16), np.uint8)
        missing = len(self._params) - len(arguments)  # pointers to scratch memory that no kernel here uses
        self._arguments = dict(zip(self._params, [*arguments, *[0] * missing], strict=True))
        place = 0
        with np.errstate(all="ignore"):
            while place < len(self._code):
                place = self._step(self._code[place], place)

    def _step(self, instruction: Instruction, place: int) -> int:
        """Execute an instruction, and return the place of the next one."""
        head = instruction.kinds[0]
        if head == "ret":
            return len(self._code)
        mask = None if instruction.guard is None else self._get(instruction.guard, "pred")
        if head == "bra":
            if mask is not None and mask.any() != mask.all():
                raise DivergedError(instruction.operands[0])
            return self._labels[instruction.operands[0]] if mask is None or mask.all() else place + 1
        if instruction.op == "bar.sync":
            self._era += 1
        if head in ("bar", "fence", "griddepcontrol"):
            return place + 1
        handler = getattr(self, f"_{head}", None)
        if handler is not None:
            handler(instruction, mask)
        elif head in _ARITHMETIC:
            self._arithmetic(instruction, mask)
        else:
            raise NotImplementedError(f"{instruction.op} {instruction.operands}")
        return place + 1

    # Operands

    def _get(self, name: str, kind: str) -> Array:
        """Return an operand's values in each thread."""
        if kind == "pred":
            if re.fullmatch(r"-?\d+", name):
                return np.full(self._count, int(name) != 0)
            return ~self._registers[name[1:]] if name.startswith("!") else self._registers[name]
        if name in self._registers:
            bits = self._registers[name]
        elif name.startswith("0f"):
            bits = np.full(self._count, int(name[2:], 16), np.uint64)
        elif name.startswith("%"):  # never written: a result that depends on it differs from torch's
            bits = np.full(self._count, _UNWRITTEN, np.uint64)
        else:
            bits = np.full(self._count, int(name.rstrip("U"), 0) & _FULL, np.uint64)
        size = int(kind[1:])
        return bits.astype(f"u{size // 8}").view(f"{_NAMES[kind[0]]}{size // 8}")

    def _put(self, name: str, values: Array, mask: Array | None = None) -> None:
        """Set a register from values of any type."""
        name = name.split("|")[0]
        if values.dtype == np.float32:
            values = np.where(np.isnan(values), _NAN, values.view(np.uint32))
        if values.dtype != np.bool_:
            values = np.ascontiguousarray(values)
            values = values.view(f"u{values.dtype.itemsize}").astype(np.uint64)
        if mask is not None:
            values = np.where(mask, values, self._registers.get(name, np.zeros_like(values)))
        self._registers[name] = values

    def _put_bits(self, name: str, bits: Array, kind: str) -> None:
        """Set a register from bits, without the rules of arithmetic: a NaN keeps its payload."""
        self._put(name, bits.astype(f"u{int(kind[1:]) // 8}"))

    def _address(self, text: str) -> Array:
        name, _, offset = text.strip("[] ").partition("+")
        base: Array = self._get(name.strip(), "b64")
        moved: Array = base + np.uint64(int(offset.strip() or "0", 0) & _FULL)
        return moved

    # Moves

    def _mov(self, instruction: Instruction, mask: Array | None) -> None:
        to, source = instruction.operands
        kind = instruction.kinds[-1]
        if kind == "pred":
            self._put(to, self._get(source, kind), mask)
        elif to.startswith("{"):
            names = _names(to)
            size = int(kind[1:]) // len(names)
            for number, name in enumerate(names):
                self._put_bits(name, self._get(source, "b64") >> np.uint64(size * number), f"b{size}")
        elif source.startswith("{"):
            names = _names(source)
            size = int(kind[1:]) // len(names)
            bits = np.zeros(self._count, np.uint64)
            for number, name in enumerate(names):
                bits |= self._get(name, f"u{size}").astype(np.uint64) << np.uint64(size * number)
            self._put_bits(to, bits, kind)
        else:
            bits = self._get(source, f"b{kind[1:]}")
            self._put(to, bits, mask)

    def _cvta(self, instruction: Instruction, mask: Array | None) -> None:
        self._put(instruction.operands[0], self._get(instruction.operands[1], "b64"), mask)

    def _ld(self, instruction: Instruction, mask: Array | None) -> None:
        kind = instruction.kinds[-1]
        size = int(kind[1:]) // 8
        if instruction.kinds[1] == "param":
            value = self._arguments[instruction.operands[1].strip("[] ")]
            bits = int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value & _FULL
            self._put(instruction.operands[0], np.full(self._count, bits, np.uint64))
            return
        names, address = _names(instruction.operands[0]), self._address(instruction.operands[1])
        chosen = np.ones(self._count, bool) if mask is None else mask
        self._check_aligned(address[chosen], size * len(names))
        for number, name in enumerate(names):
            at = address[chosen] + np.uint64(size * number)
            values = self._registers.get(name, np.zeros(self._count, np.uint64)).copy()
            if instruction.kinds[1] == "shared":
                values[chosen] = self._load_shared(self._cta[chosen], at, size)
            else:
                values[chosen] = self._memory.load(
                    at, size, self._thread[chosen], self._cta[chosen], self._era
                )
            if kind.startswith("s"):
                values = values.astype(f"u{size}").view(f"i{size}").astype(np.int64).view(np.uint64)
            self._registers[name] = values

    def _st(self, instruction: Instruction, mask: Array | None) -> None:
        size = int(instruction.kinds[-1][1:]) // 8
        names, address = _names(instruction.operands[1]), self._address(instruction.operands[0])
        chosen = np.ones(self._count, bool) if mask is None else mask
        self._check_aligned(address[chosen], size * len(names))
        for number, name in enumerate(names):
            at = address[chosen] + np.uint64(size * number)
            values = self._get(name, "b64")[chosen]
            if instruction.kinds[1] == "shared":
                self._store_shared(self._cta[chosen], at, size, values)
            else:
                self._memory.store(at, size, values, self._thread[chosen], self._cta[chosen], self._era)

    @staticmethod
    def _check_aligned(address: Array, size: int) -> None:
        if (address % np.uint64(size)).any():
            raise IndexError(f"an access of {size} bytes is not aligned")

    def _load_shared(self, cta: Array, at: Array, size: int) -> Array:
        values = np.zeros(at.shape, np.uint64)
        for byte in range(size):
            values |= self._shared[cta, at.astype(np.int64) + byte].astype(np.uint64) << np.uint64(8 * byte)
        return values

    def _store_shared(self, cta: Array, at: Array, size: int, values: Array) -> None:
        for byte in range(size):
            self._shared[cta, at.astype(np.int64) + byte] = (values >> np.uint64(8 * byte)).astype(np.uint8)

    def _matrix_places(self, text: str, number: int) -> tuple[Array, Array]:
        """Return each thread's CTA and place in shared memory of its two numbers of an 8x8 matrix."""
        rows = self._address(text).reshape(-1, WARP)[:, 8 * number : 8 * number + 8]
        lane = np.arange(WARP)
        at = rows[:, lane // 4] + (lane % 4 * 4).astype(np.uint64)
        return self._cta, at.reshape(-1)

    def _ldmatrix(self, instruction: Instruction, mask: Array | None) -> None:
        for number, name in enumerate(_names(instruction.operands[0])):
            self._put_bits(
                name, self._load_shared(*self._matrix_places(instruction.operands[1], number), 4), "b32"
            )

    def _stmatrix(self, instruction: Instruction, mask: Array | None) -> None:
        for number, name in enumerate(_names(instruction.operands[1])):
            cta, at = self._matrix_places(instruction.operands[0], number)
            self._store_shared(cta, at, 4, self._get(name, "b64"))

    # Conversions and comparisons

    def _cvt(self, instruction: Instruction, mask: Array | None) -> None:
        to, source = instruction.kinds[-2:]
        if to == "f16x2":  # the first operand becomes the upper half
            upper, lower = (
                self._get(name, source).astype(np.float16).view(np.uint16).astype(np.uint32)
                for name in instruction.operands[1:]
            )
            self._put(instruction.operands[0], upper << np.uint32(16) | lower, mask)
            return
        if source[0] == "f" and to[0] != "f" and "rzi" not in instruction.kinds:
            raise NotImplementedError(instruction.op)
        values = self._get(instruction.operands[1], source)
        values = values.astype(f"{_NAMES[to[0]]}{int(to[1:]) // 8}")
        # A result that is narrower than its register fills it with its sign.
        self._put(instruction.operands[0], values.astype(np.int64) if to == "s8" else values, mask)

    def _setp(self, instruction: Instruction, mask: Array | None) -> None:
        to, *sources = instruction.operands
        kind = instruction.kinds[-1].replace("b", "u")
        compare: dict[str, Callable[[Array, Array], Array]] = {
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "eq": np.equal,
            "ne": np.not_equal,
            "neu": np.not_equal,  # true for NaN, as numpy's is
            "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
            "nan": lambda a, b: np.isnan(a) | np.isnan(b),
        }
        relation = instruction.kinds[1]
        if relation == "ne" and kind == "f32":
            raise UnspecifiedError("setp.ne.f32 is ordered; not implemented")
        self._put(to, compare[relation](*[self._get(source, kind) for source in sources]), mask)

    def _selp(self, instruction: Instruction, mask: Array | None) -> None:
        to, yes, no, condition = instruction.operands
        kind = f"b{instruction.kinds[-1][1:]}"
        chosen = np.where(self._get(condition, "pred"), self._get(yes, kind), self._get(no, kind))
        self._put(to, chosen, mask)

    # Integers and floats

    def _arithmetic(self, instruction: Instruction, mask: Array | None) -> None:
        head, kind = instruction.kinds[0], instruction.kinds[-1]
        to, *names = instruction.operands
        if "approx" in instruction.kinds or "full" in instruction.kinds or "ftz" in instruction.kinds:
            raise UnspecifiedError(instruction.op)
        if kind == "f32x2":
            halves = [[self._get(name, "b64") >> np.uint64(s) for name in names] for s in (0, 32)]
            low, high = (
                _canonical(_ARITHMETIC[head](*[half.astype(np.uint32).view(np.float32) for half in one]))
                for one in halves
            )
            self._put(to, low | high << np.uint64(32), mask)
        elif kind.endswith("x2"):  # two 16-bit integers
            halves = [[self._get(name, "b32") >> np.uint32(s) for name in names] for s in (0, 16)]
            low, high = (_ARITHMETIC[head](*[half.astype(np.uint16) for half in one]) for one in halves)
            self._put(to, low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16), mask)
        elif "hi" in instruction.kinds:
            self._put(to, _upper_half(*[self._get(name, kind) for name in names]), mask)
        elif "wide" in instruction.kinds:
            size = 2 * int(kind[1:])
            wide = [self._get(name, kind).astype(f"{_NAMES[kind[0]]}{size // 8}") for name in names[:2]]
            wide += [self._get(name, f"{kind[0]}{size}") for name in names[2:]]
            self._put(to, _ARITHMETIC[head](*wide), mask)
        elif instruction.kinds[-2:] == ("f32", "f16"):  # the first operand is widened, which is exact
            first, *rest = names
            operands = [self._get(first, kind).astype(np.float32)]
            operands += [self._get(name, "f32") for name in rest]
            self._put(to, _ARITHMETIC[head](*operands), mask)
        else:
            self._put(to, _ARITHMETIC[head](*[self._get(name, kind) for name in names]), mask)

    def _shl(self, instruction: Instruction, mask: Array | None) -> None:
        self._shift(instruction, mask, np.left_shift)

    def _shr(self, instruction: Instruction, mask: Array | None) -> None:
        self._shift(instruction, mask, np.right_shift)

    def _shift(self, instruction: Instruction, mask: Array | None, shift: Callable[..., Array]) -> None:
        to, name, by = instruction.operands
        kind = instruction.kinds[-1]
        values, amount = self._get(name, kind), self._get(by, "u32")
        size = 8 * values.dtype.itemsize
        # PTX clamps amounts to the size, C leaves larger ones open.
        shifted = shift(values, np.minimum(amount, size - 1).astype(values.dtype))
        rest = np.where(values < 0, -1, 0).astype(values.dtype) if shift is np.right_shift else 0
        self._put(to, np.where(amount < size, shifted, rest).astype(values.dtype), mask)

    def _bfe(self, instruction: Instruction, mask: Array | None) -> None:
        to, name, start, length = instruction.operands
        kind = instruction.kinds[-1]
        size = int(kind[1:])
        low, count = int(start, 0), int(length, 0)
        values = self._get(name, kind) << np.array(size - low - count).astype(f"{_NAMES[kind[0]]}{size // 8}")
        self._put(to, values >> np.array(size - count).astype(values.dtype), mask)

    def _popc(self, instruction: Instruction, mask: Array | None) -> None:
        to, name = instruction.operands
        bits = self._get(name, "u32")
        counts = sum((bits >> np.uint32(place)) & np.uint32(1) for place in range(32))
        self._put(to, np.asarray(counts, np.uint32), mask)

    def _prmt(self, instruction: Instruction, mask: Array | None) -> None:
        to, low, high, selector = instruction.operands
        pool = self._get(low, "u32").astype(np.uint64) | self._get(high, "u32").astype(
            np.uint64
        ) << np.uint64(32)
        bits = np.zeros(self._count, np.uint64)
        for byte in range(4):
            nibble = (self._get(selector, "u32") >> np.uint32(4 * byte)).astype(np.uint64) & np.uint64(15)
            value = (pool >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(value >> np.uint64(7), np.uint64(255), np.uint64(0))
            bits |= np.where(nibble >> np.uint64(3), sign, value) << np.uint64(8 * byte)
        self._put_bits(to, bits, "b32")

    # Exchanges between the threads of a warp

    def _redux(self, instruction: Instruction, mask: Array | None) -> None:
        _, _, operation, kind = instruction.kinds
        values = self._get(instruction.operands[1], kind).reshape(-1, WARP)
        reduce: dict[str, Callable[..., Array]] = {
            "add": np.add.reduce,
            "max": np.maximum.reduce,
            "min": np.minimum.reduce,
            "and": np.bitwise_and.reduce,
            "or": np.bitwise_or.reduce,
        }
        result = reduce[operation](values, axis=1, dtype=values.dtype)
        self._put(instruction.operands[0], np.repeat(result, WARP), mask)

    def _shfl(self, instruction: Instruction, mask: Array | None) -> None:
        to, name, by = instruction.operands[:3]
        values = self._get(name, "u32").reshape(-1, WARP)
        lane = np.broadcast_to(np.arange(WARP), values.shape)
        amount = self._get(by, "u32").reshape(-1, WARP).astype(np.int64)
        if "bfly" in instruction.kinds:
            source = lane ^ amount
        elif "idx" in instruction.kinds:
            source = amount % WARP
        elif "up" in instruction.kinds and instruction.operands[3] == "0":
            source = np.where(lane >= amount, lane - amount, lane)  # the first lanes keep their own value
        else:
            raise NotImplementedError(instruction.op)
        self._put(to, np.take_along_axis(values, source, axis=1).reshape(-1))


def _names(text: str) -> list[str]:
    """Return the registers of `{%r1, %r2}`, or of one without braces."""
    return [name.strip() for name in text.strip("{} ").split(",")]


def _canonical(x: Array) -> Array:
    """Return the bits of float32 numbers as 64-bit integers, with the GPU's NaN."""
    return np.where(np.isnan(x), _NAN, x.view(np.uint32)).astype(np.uint64)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded once: the sum is rounded to odd in double precision, then to single."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)  # total + error is exact
    even = total.view(np.int64) & 1 == 0
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & even
    toward = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(inexact, (total.view(np.int64) + toward).view(np.float64), total)
    return odd.astype(np.float32)


def _upper_half(a: Array, b: Array) -> Array:
    """Return the upper half of the product of two integers, of which Python's have any length."""
    size = 8 * a.dtype.itemsize
    product = (a.astype(object) * b.astype(object)) >> size
    upper: Array = (product & ((1 << size) - 1)).astype(f"u{size // 8}").view(a.dtype)
    return upper


def _mad(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def _divide(a: Array, b: Array) -> Array:
    return np.divide(a, b) if a.dtype == np.float32 else np.floor_divide(a, b)


_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": _mad,
    "div": _divide,
    "fma": _fma,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
