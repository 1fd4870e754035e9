"""Step records reach their sinks from an ordinary training loop."""

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, mlp
from thinwire import telemetry

STEPS = 5


class Kept:
    """A sink of one's own."""

    def __init__(self) -> None:
        self.rows: list[telemetry.sinks.Row] = []
        self.closed = 0

    def write(self, row: telemetry.sinks.Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed += 1


def train_watched(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[str], str, int]:
    ddp = DDP(mlp())
    wire = thinwire.attach(ddp, thinwire.Exact())
    ddp(batch(rank, 99)).sum().backward()  # before the watch: not its business
    kept, text = Kept(), StringIO()
    path = Path(folder) / f"{rank}.jsonl"
    sinks = (
        kept,
        telemetry.JsonLines(path),
        telemetry.Console(every=2, console=RichConsole(file=text, width=200)),
    )
    with telemetry.watch(ddp, wire, *sinks) as watch:
        for step in range(STEPS):
            ddp(batch(rank, step)).sum().backward()
    watch.close()
    ddp(batch(rank, 98)).sum().backward()
    ddp(batch(rank, 97)).sum().backward()
    return kept.rows, path.read_text().splitlines(), text.getvalue(), kept.closed


def test_every_step_arrives_once_in_every_sink(tmp_path: Path) -> None:
    for rows, lines, text, closed in run_ranks(train_watched, 2, str(tmp_path)):
        assert [row["step"] for row in rows] == list(range(1, 1 + STEPS))
        assert [json.loads(line) for line in lines] == rows
        assert all(row["bytes_sent"] == row["bytes/AllReduce"] > 0 for row in rows)
        assert all(row["exposed_seconds"] >= 0 for row in rows)
        assert [line.split()[1] for line in text.splitlines()] == ["2", "4"]
        assert closed == 1


ROW: telemetry.sinks.Row = {"step": 3, "bytes_sent": 10, "wire_seconds": None, "exposed_seconds": 0.5}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sink = telemetry.TensorBoard(tmp_path)
    sink.write(ROW)
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["thinwire/bytes_sent", "thinwire/exposed_seconds"]
    assert [(event.step, event.value) for event in events.Scalars("thinwire/exposed_seconds")] == [(3, 0.5)]


def test_wandb_receives_values_under_its_own_step() -> None:
    class Run:
        logged: list[dict[str, Any]] = []  # noqa: RUF012 - a stand-in for wandb's run

        def log(self, values: dict[str, Any]) -> None:
            self.logged.append(values)

    sink = telemetry.WandB(Run())
    sink.write(ROW)
    sink.close()
    assert Run.logged == [{"thinwire/step": 3, "thinwire/bytes_sent": 10, "thinwire/exposed_seconds": 0.5}]


@pytest.mark.parametrize(
    ("library", "sink"),
    [("wandb", telemetry.WandB), ("tensorboard", telemetry.TensorBoard), ("rich.console", telemetry.Console)],
)
def test_a_missing_library_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, library: str, sink: Any
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(thinwire.UnavailableError, match="pip install"):
        sink()


def test_bad_options_are_errors(tmp_path: Path) -> None:
    with pytest.raises(thinwire.OptionError, match="every=0 must be at least 1"):
        telemetry.Console(every=0)
    with pytest.raises(thinwire.OptionError, match="cannot be written"):
        telemetry.JsonLines(tmp_path / "none" / "x.jsonl")


def test_a_log_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "bytes_se')
    sink = telemetry.JsonLines(path)
    sink.write({"step": 1})
    sink.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    other = tmp_path / "notes.txt"
    other.write_text("not ours, and without a line's end")
    telemetry.JsonLines(other).close()
    assert other.read_text() == "not ours, and without a line's end"
