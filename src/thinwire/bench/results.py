"""What was measured, as it is kept on disk: raw values only, so that every figure can be derived again."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import StateError

FORMAT = 1


@dataclass
class Track:
    """One contestant in one cell; lists have one value per step: times of the slowest rank, else the mean.

    Attributes:
        rival: The name of torch's hook for the same thing.
        unavailable: Why it could not run; nothing else is filled in then.
        device_bytes: Read off the network device, per rank; empty where nobody can tell.
        meter_bytes: Counted by thinwire, per rank; empty where it is not thinwire.
        encode_seconds: Time within the program; likewise, and empty where times are not known.
        wire_seconds: Time with a collective under way; likewise.
        exposed_seconds: Time that backward waited for the network; likewise.
        losses: (steps done, held-out loss).
        peak_memory: Of a process that trains just this, in bytes.
    """

    name: str
    kind: str
    text: str
    rival: str | None = None
    unavailable: str | None = None
    step_seconds: list[float] = field(default_factory=list)
    device_bytes: list[float] = field(default_factory=list)
    meter_bytes: list[float] = field(default_factory=list)
    encode_seconds: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    peak_memory: int | None = None


@dataclass
class Cell:
    """One workload on one network.

    Attributes:
        network: In words.
        link: The asked link, or what the real network is called.
        rate: Bits per second of the slowest link, if one is known.
        error: Why the cell has no tracks.
    """

    workload: str
    hosts: int
    link: str
    network: str
    rate: int | None = None
    parameters: int = 0
    tracks: list[Track] = field(default_factory=list)
    error: str | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells it apart in its grid."""
        return self.workload, self.hosts, self.link

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Cell":
        """The cell that `dataclasses.asdict` turned into plain values."""
        known = {one.name for one in dataclasses.fields(Cell)}
        tracks = [Track(**track) for track in data["tracks"]]
        for track in tracks:
            track.losses = [(step, math.nan if loss is None else loss) for step, loss in track.losses]
        return Cell(**{**{key: data[key] for key in known & set(data)}, "tracks": tracks})


@dataclass
class Results:
    """A whole benchmark.

    Attributes:
        command: Repeats it.
        settings: What was asked for; a run resumes only where these are the same.
        machine: What it ran on.
    """

    command: str
    settings: dict[str, Any]
    machine: dict[str, str]
    cells: list[Cell] = field(default_factory=list)

    def save(self, path: Path, summary: list[dict[str, Any]]) -> None:
        """Replace the file at once: an interrupted run leaves the last whole state."""
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
        """Read a results file; raises StateError where it is none."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise StateError(
                    f"{path} has format {data['format']!r}, not {FORMAT}: run the benchmark again"
                )
            cells = [Cell.from_json(cell) for cell in data["cells"]]
            return Results(data["command"], data["settings"], data["machine"], cells)
        except OSError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"{path} is no results file of thinwire bench ({error!r})") from error


def plain(data: Any) -> Any:
    """The same with None for what JSON has no word for: inf and NaN."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return data
