"""Step records reach their sinks from an ordinary training loop."""

import contextlib
import errno
import json
import logging
import math
import sys
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console as RichConsole
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, mlp
from thinwire import telemetry
from thinwire.telemetry.log import Log
from thinwire.tools.report.training import whose
from thinwire.tools.report.training_summary import summarise

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
    path = Path(folder) / "steps.jsonl"
    sinks = (
        kept,
        telemetry.JsonLines(path),
        telemetry.Console(every=2, console=RichConsole(file=text, width=200)),
    )
    with telemetry.watch(ddp, wire, *sinks, ranks="all") as watch:
        for step in range(STEPS):
            ddp(batch(rank, step)).sum().backward()
    watch.close()
    ddp(batch(rank, 98)).sum().backward()
    ddp(batch(rank, 97)).sum().backward()
    path = path.with_name("steps-rank1.jsonl") if rank else path
    return kept.rows, path.read_text().splitlines(), text.getvalue(), kept.closed


def test_every_step_arrives_once_in_every_sink_and_ranks_are_kept_apart(tmp_path: Path) -> None:
    for rank, (rows, lines, text, closed) in enumerate(run_ranks(train_watched, 2, str(tmp_path))):
        assert {(row["rank"], row["world_size"]) for row in rows} == {(rank, 2)}
        assert [row["step"] for row in rows] == list(range(1, 1 + STEPS))
        assert [json.loads(line) for line in lines] == rows
        assert all(row["bytes_sent"] == row["bytes/AllReduce"] > 0 for row in rows)
        assert all(row["exposed_seconds"] >= 0 for row in rows)
        steps = [line.removeprefix(f"rank {rank}  " if rank else "") for line in text.splitlines()]
        assert [step.split()[:2] for step in steps] == [["step", "2"], ["step", "4"]]
        assert "encode" in text
        assert closed == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps-rank1.jsonl", "steps.jsonl"]


def train_with_overflows(rank: int, world_size: int, folder: str) -> tuple[list[Any], int]:
    ddp = DDP(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    wire = thinwire.attach(ddp, thinwire.Exact(), optimizer=optimizer)
    kept = Kept()
    with telemetry.watch(ddp, wire, kept, telemetry.JsonLines(Path(folder) / "steps.jsonl")):
        for number, fact in enumerate(".x.xx"):
            optimizer.zero_grad()
            loss = ddp(batch(rank, number)).sum()
            (loss * float("inf") if fact == "x" and rank == 1 else loss).backward()
            optimizer.step()
    return kept.rows, kept.closed


def test_only_rank_0_writes_and_logs_overflows_as_facts_the_last_step_too(tmp_path: Path) -> None:
    (rows, closed), others = run_ranks(train_with_overflows, 2, str(tmp_path))
    assert [(row["step"], row["overflowed"]) for row in rows] == [
        (0, False),
        (1, True),
        (1, False),
        (2, True),
        (2, True),
    ]
    assert (closed, others) == (1, ([], 1))
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]
    log = Log.load(tmp_path / "steps.jsonl")
    assert (log.rank, log.world_size, summarise(log).overflows) == (0, 2, 3)


def train_logged(rank: int, world_size: int) -> tuple[list[Any], str, str]:
    ddp = DDP(mlp())
    wire = thinwire.attach(ddp, thinwire.Schedule({0: thinwire.Exact(), 2: thinwire.Int8()}))
    kept, text = Kept(), StringIO()
    console = telemetry.Console(console=RichConsole(file=text, width=200))
    with telemetry.watch(ddp, wire, kept, console) as watch:
        for step in range(4):
            with ddp.no_sync():  # two batches make a step, and their mean is its loss
                loss = ddp(batch(rank, step)).sum() * 0 + step
                watch.log(loss=loss)
                loss.backward()
            loss = ddp(batch(rank, step)).sum() * 0 + step + 1
            loss.backward()
            watch.log(loss=loss, rate=math.nan if step == 3 else 0.1)
    with pytest.raises(thinwire.OptionError) as raised:
        watch.log(loss=torch.ones(3))
    return kept.rows, text.getvalue(), str(raised.value)


def test_a_loop_logs_its_loss_and_rows_have_the_program_and_the_time() -> None:
    (rows, text, error), (others, _, _) = run_ranks(train_logged, 2)
    assert others == []
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["log/loss"] for row in rows] == [0.5, 1.5, 2.5, 3.5]
    assert [row["log/rate"] for row in rows] == [0.1, 0.1, 0.1, None]
    assert [row.get("program") for row in rows] == ["Exact()", None, "Int8()", None]
    assert all(before["time"] <= after["time"] for before, after in pairwise(rows))
    assert text.splitlines()[0].endswith("loss 0.5  rate 0.1")
    assert "loss is a Tensor of shape (3,), expected one number" in error
    log = Log.of(rows)
    assert list(log.logged["loss"].values) == [0.5, 1.5, 2.5, 3.5]
    assert log.programs == [(0, "Exact()"), (2, "Int8()")]


def train_in_pairs(rank: int, world_size: int, folder: str, ranks: Any) -> list[Any]:
    """Two groups in one job, as with tensor parallelism. Each has a rank 0 of its own."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DDP(mlp(width=8, layers=2), process_group=pairs[rank % 2])
    wire = thinwire.attach(ddp, thinwire.Exact())
    kept = Kept()
    with telemetry.watch(ddp, wire, kept, telemetry.JsonLines(Path(folder) / "steps.jsonl"), ranks=ranks):
        for step in range(STEPS):
            ddp(batch(rank, step, width=8)).sum().backward()
    return kept.rows


def test_groups_of_one_job_write_to_different_files(tmp_path: Path) -> None:
    first, all_ = tmp_path / "first", tmp_path / "all"
    for folder, ranks, names in (
        (first, "rank0", ["steps-rank1.jsonl", "steps.jsonl"]),
        (all_, "all", ["steps-rank1.jsonl", "steps-rank2.jsonl", "steps-rank3.jsonl", "steps.jsonl"]),
    ):
        folder.mkdir()
        rows = run_ranks(train_in_pairs, 4, str(folder), ranks)
        assert sorted(path.name for path in folder.iterdir()) == names
        for rank, own in enumerate(rows):
            writes = ranks == "all" or rank < 2
            assert [row["step"] for row in own] == (list(range(STEPS)) if writes else [])
            assert {(row["rank"], row["world_size"]) for row in own} == ({(rank, 2)} if writes else set())
        for path in folder.iterdir():
            assert summarise(Log.load(path)).steps == STEPS
    log = Log.load(all_ / "steps-rank3.jsonl")
    assert whose(log) == ", rank 3, in a group of 2"
    with pytest.raises(thinwire.StateError, match="rows of rank 1 follow rows of rank 0"):
        Log.of([*map(json.loads, (first / "steps.jsonl").read_text().splitlines()), *rows[1]])


def train_without_the_folder(rank: int, world_size: int, folder: str) -> None:
    """The folder of the log is on rank 0's host only."""
    ddp = DDP(mlp(width=8, layers=2))
    wire = thinwire.attach(ddp, thinwire.Exact())
    path = Path(folder) / ("here" if rank == 0 else "elsewhere") / "steps.jsonl"
    with telemetry.watch(ddp, wire, telemetry.JsonLines(path)):
        ddp(batch(rank, 0, width=8)).sum().backward()
    if rank == 1:
        with pytest.raises(thinwire.OptionError, match="its folder does not exist"):
            telemetry.watch(ddp, wire, telemetry.JsonLines(path), ranks="all")


def test_ranks_that_do_not_write_need_no_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    run_ranks(train_without_the_folder, 2, str(tmp_path))
    assert summarise(Log.load(tmp_path / "here" / "steps.jsonl")).steps == 1


class Failing(Kept):
    """A sink whose second row fails, and so does its end."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, row: telemetry.sinks.Row) -> None:
        super().write(row)
        if len(self.rows) == 2:
            raise self.error

    def close(self) -> None:
        super().close()
        if self.rows:
            raise self.error


class Full:
    """A run of W&B, or a writer of TensorBoard, on a full disk."""

    def log(self, values: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def add_scalar(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None: ...


def train_with_failing_sinks(rank: int, world_size: int) -> tuple[list[Any], list[str], list[list[int]]]:
    ddp = DDP(mlp(width=8, layers=2))
    wire = thinwire.attach(ddp, thinwire.Exact())
    kept, failing = Kept(), [Failing(OSError("no room")), Failing(ValueError("I/O operation on closed file"))]
    with Path("/dev/full").open("w") as full, log_of_thinwire() as messages:
        sinks: tuple[telemetry.Sink, ...] = (
            telemetry.JsonLines("/dev/full"),
            telemetry.Console(console=RichConsole(file=full)),
            telemetry.TensorBoard(writer=Full()),
            telemetry.WandB(Full()),
            *failing,
            kept,
        )
        with telemetry.watch(ddp, wire, *sinks):
            for step in range(STEPS):
                ddp(batch(rank, step, width=8)).sum().backward()
        with contextlib.suppress(OSError):  # what the console could not write
            full.close()
    return kept.rows, messages, [[len(sink.rows), sink.closed] for sink in failing]


@contextlib.contextmanager
def log_of_thinwire() -> Iterator[list[str]]:
    """Collect the warnings of thinwire."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def test_a_full_disk_ends_neither_the_training_nor_the_other_sinks() -> None:
    (rows, messages, failing), (_, others, _) = run_ranks(train_with_failing_sinks, 2)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert others == []
    names = ("JsonLines", "Console", "TensorBoard", "WandB", "Failing", "Failing")
    assert len(messages) == len(names), messages
    for name in names:
        assert any(f"the telemetry sink {name} failed (" in one for one in messages), messages
    assert sum("No space left on device" in one for one in messages) == 4
    assert failing == [[2, 1], [2, 1]], "no row after the failure, and closed once"


def test_a_closed_pipe_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(BrokenPipeError):
        telemetry.Console().write({"encode_seconds": None, **ROW})


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
    place = {"thinwire/step": 3, "thinwire/rank": 0}
    assert Run.logged == [{**place, "thinwire/bytes_sent": 10, "thinwire/exposed_seconds": 0.5}]


def test_sinks_open_nothing_before_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def init() -> Any:
        begun.append(SimpleNamespace(log=lambda values: None))
        return begun[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=init))
    sinks = (telemetry.WandB(), telemetry.TensorBoard(tmp_path), telemetry.JsonLines(tmp_path / "x.jsonl"))
    for sink in sinks:
        sink.close()
    assert (begun, list(tmp_path.iterdir())) == ([], [])
    for sink in sinks:
        sink.write({**ROW, "rank": 3})
        sink.close()
    assert len(begun) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank3", "x-rank3.jsonl"]


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
    for path in (tmp_path / "none" / "x.jsonl", tmp_path):
        with pytest.raises(thinwire.OptionError, match="cannot be written"):
            telemetry.JsonLines(path).check_writable()
        with pytest.raises(thinwire.OptionError, match="cannot be written"):
            telemetry.JsonLines(path).write(ROW)
    with pytest.raises(thinwire.OptionError, match="ranks='1' is not one of 'rank0', 'all'"):
        telemetry.watch(None, None, ranks="1")  # type: ignore[arg-type] # refused before they are looked at


def test_a_log_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "bytes_se')
    sink = telemetry.JsonLines(path)
    sink.write({"step": 1})
    sink.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    path.write_text('{"step": 0}\n{"step": 1, "error/' + "x" * (3 << 20))
    sink.write({"step": 1})  # a closed sink goes on, too
    sink.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    path.write_text("")
    sink.write({"step": 0})
    sink.close()
    assert path.read_text() == '{"step": 0}\n'
    other = tmp_path / "notes.txt"
    other.write_text("not ours, and without a line's end")
    telemetry.JsonLines(other).close()
    assert other.read_text() == "not ours, and without a line's end"
