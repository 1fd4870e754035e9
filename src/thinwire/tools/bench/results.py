"""The results file of a benchmark.

It holds raw measurements. Figures are derived when it is read, so that a wrong formula can be fixed without
measuring again.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from thinwire.errors import StateError

FORMAT = 1
REAL_LINK = "this network"
"""The link of a cell that was measured under torchrun, on a real network."""
_LARGEST, _SHORTEST, _MOST_HOSTS, _MOST_SHOWN = 1e40, 1e-9, 1 << 16, 80
"""Limits of a file's numbers, so that no figure overflows, and of a value's length in errors."""
_POINTS = list[tuple[int, float | None]]
_IN_FILE: dict[str, Any] = {
    "losses": _POINTS,
    "seed_losses": list[_POINTS],
    "rate": float | None,
    "settings": dict[str, str | int | float | bool | list[str] | None],
}
"""Fields whose type in a file is not the annotated one. A loss that is not finite is null."""


@dataclass
class Track:
    """The measurements of one contestant in one cell.

    Lists of times and bytes have one value for each step that was measured on the link. Losses may be of more
    steps. Times of steps, first gradients and optimizers are those of the slowest rank, the others are means
    over ranks.

    Attributes:
        name: The contestant's name in tables.
        kind: "ddp", "thinwire", "torch" or "alone".
        text: The program as the user wrote it.
        rival: The name of torch's counterpart, or None.
        unavailable: Why it could not run. All other values are then empty.
        step_seconds: Time of forward, backward and the optimizer's step.
        cpu_seconds: Processor time of a rank in that time, of all its threads.
        device_bytes: Bytes sent, as counted by the network device. Empty if the device is not known.
        meter_bytes: Bytes sent, as counted by thinwire. Empty for other contestants.
        encode_seconds: Time spent in the program. Empty if not known.
        wire_seconds: Time with a collective in flight. Empty if not known.
        exposed_seconds: Time that backward waited for the network. Empty if not known.
        first_gradient_seconds: Time from the start of a step to its first gradient. Measured without
            communication only.
        optimizer_seconds: Time of the optimizer's step. Measured without communication only.
        losses: Pairs (finished steps, held-out loss). Models that ranks train apart are averaged first.
        seed_losses: The same as `losses`, for each other seed.
        peak_memory: Peak bytes of a process that trains only this contestant.
        bucket_mb: The size of DDP's buckets. None for DDP's default, or without DDP.
        cycle: The number of steps after which costs repeat. None if they do not repeat.
        averages_models: Whether ranks train separate models between averages.
    """

    name: str
    kind: str
    text: str
    rival: str | None = None
    unavailable: str | None = None
    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    device_bytes: list[float] = field(default_factory=list)
    meter_bytes: list[float] = field(default_factory=list)
    encode_seconds: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)
    first_gradient_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    seed_losses: list[list[tuple[int, float]]] = field(default_factory=list)
    peak_memory: int | None = None
    bucket_mb: float | None = None
    cycle: int | None = 1
    averages_models: bool = False


@dataclass
class Cell:
    """The measurements of one workload on one network.

    Attributes:
        workload: A built-in name, or `package.module:build`.
        hosts: The number of ranks.
        link: The requested link, or "this network" for a real one.
        network: A description of the network.
        rate: Bits per second of the slowest link. None if unlimited or not known.
        parameters: The number of the model's parameters.
        tracks: The measurements of each contestant.
        error: Why the cell failed and has no tracks, or None.
        cores: The cores of the machine that measured it. 0 if not known.
        other_cores: Cores that other processes used meanwhile, on average. None if not known.
    """

    workload: str
    hosts: int
    link: str
    network: str
    rate: int | None = None
    parameters: int = 0
    tracks: list[Track] = field(default_factory=list)
    error: str | None = None
    cores: int = 0
    other_cores: float | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """The cell's identity within a grid."""
        return self.workload, self.hosts, self.link

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Cell":
        """Rebuild a cell from the plain values of `dataclasses.asdict`."""
        tracks = [Track(**track) for track in data["tracks"]]
        cell = Cell(**{**data, "tracks": []})
        _check_types(cell, f"cell {_short(cell.key)}")
        for track in tracks:
            _check_types(track, f"{_short(track.name)} in cell {_short(cell.key)}")
            track.losses = _points(track.losses)
            track.seed_losses = [_points(points) for points in track.seed_losses]
        cell.tracks = tracks
        _check_values(cell)
        return cell


@dataclass
class Results:
    """A whole benchmark.

    Attributes:
        command: The command line that repeats it.
        settings: The requested settings. A run resumes only if these are equal.
        machine: The machine and its software.
        cells: The measurements, by workload and network.
    """

    command: str
    settings: dict[str, Any]
    machine: dict[str, str]
    cells: list[Cell] = field(default_factory=list)

    def save(self, path: Path, summary: list[dict[str, Any]]) -> None:
        """Write the results to a file atomically, so that an interrupted run leaves the previous version.

        Args:
            path: The file.
            summary: The figures derived from the results, from `thinwire.tools.bench.summary.summarize`.

        Raises:
            StateError: The file cannot be written.
        """
        data = {"format": FORMAT, "summary": summary, **dataclasses.asdict(self)}
        text = json.dumps(plain(data), indent=1, allow_nan=False)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(text)
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise StateError(f"{path} cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: Path) -> "Results":
        """Read a results file.

        Raises:
            StateError: The file cannot be read, or is not a results file.
        """
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise StateError(
                    f"{path} has format {_short(data['format'])}, expected {FORMAT}: run the benchmark again"
                )
            results = Results(data["command"], data["settings"], data["machine"])
            _check_types(results, "the file")
            if not isinstance(data["cells"], list):
                raise TypeError(f"cells is {_short(data['cells'])}")
            results.cells = [Cell.from_json(cell) for cell in data["cells"]]
            return results
        except OSError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}") from error
        except _DamagedError as error:
            raise StateError(f"{path} is damaged: {error}; run the benchmark again") from error
        except RecursionError as error:
            raise StateError(f"{path} is not a results file of thinwire bench (too many levels)") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"{path} is not a results file of thinwire bench ({_short(error)})") from error


class _DamagedError(Exception):
    """Raised for a value that no benchmark writes."""


def _check_types(made: Any, what: str) -> None:
    """Raise _DamagedError if a field has another type than its annotation, or a number out of range."""
    hints = get_type_hints(type(made)) | {name: _IN_FILE[name] for name in _IN_FILE if hasattr(made, name)}
    for name, hint in hints.items():
        if not _fits(getattr(made, name), hint):
            shown = getattr(hint, "__name__", hint) if isinstance(hint, type) else hint
            raise _DamagedError(f"{name} of {what} is {_short(getattr(made, name))}, expected {shown}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON has the type of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, kind) for kind in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
        )
    if hint in (int, float):
        return type(value) in (int, hint) and abs(value) <= _LARGEST  # False for NaN
    if hint is str:
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    return type(value) is hint


def _check_values(cell: Cell) -> None:
    """Raise _DamagedError if measurements are missing that the figures are derived from."""
    what = f"cell {_short(cell.key)}"
    if not 1 <= cell.hosts <= _MOST_HOSTS or (cell.rate is not None and cell.rate < 0):
        raise _DamagedError(f"{what} has hosts={cell.hosts} and rate={cell.rate}")
    plain = next((track for track in cell.tracks if track.kind == "ddp"), None)
    for track in cell.tracks:
        if track.unavailable is not None and track.kind not in ("ddp", "alone"):
            continue
        if not track.step_seconds or min(track.step_seconds) < _SHORTEST:
            raise _DamagedError(f"{track.name!r} in {what} has no time for each step")
        if track.cycle is not None and track.cycle < 1:
            raise _DamagedError(f"{track.name!r} in {what} has cycle={track.cycle}")
        if plain is None or track.kind == "alone":
            continue
        last = plain.losses[-1][0] if plain.losses else None
        if any(last not in dict(points) for points in (track.losses, *track.seed_losses)):
            raise _DamagedError(f"{track.name!r} in {what} has no loss after {last} steps")


def _short(value: object) -> str:
    """Return a value's repr without most of a long one."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _points(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return pairs of steps and losses of the file, where None stands for a non-finite loss."""
    return [(step, math.nan if loss is None else loss) for step, loss in pairs]


def plain(data: Any) -> Any:
    """Replace non-finite numbers, which JSON cannot represent, by None."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return data
