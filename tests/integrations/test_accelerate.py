"""Hugging Face Accelerate."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DDPCommunicationHookType
from torch import nn

import thinwire
from examples import tiny, train_accelerate
from tests.integrations.frameworks import check_metrics, check_runs, on_ranks, thinwires_messages
from thinwire.integrations.accelerate import attach


class Rows(GeneralTracker):
    """A tracker that keeps what is logged."""

    name, requires_logging_directory = "rows", False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append({"step": step, **values})


def train(options: tiny.Options, log_with: Any = None) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState.destroy_process_group = lambda *_: None  # end_training calls it, and more runs follow
    return train_accelerate.train(options, log_with)


def runs(rank: int, folder: Path) -> None:
    check_runs(rank, train, folder, lr_every=2)  # Accelerate steps a scheduler once for each process
    tracker = Rows()
    train(tiny.Options(accumulate=2, clip=0.1, compiled=True), log_with=tracker)
    assert [row["step"] for row in tracker.rows] == ([] if rank else list(range(1, 9)))
    check_metrics(tracker.rows)


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    on_ranks(runs, 2, tmp_path)


def save(rank: int, folder: Path, program: str) -> None:
    train(tiny.Options(program=program, steps=3, save_at=3, folder=folder))


def load(rank: int, folder: Path, program: str) -> tuple[int, str]:
    found = train(tiny.Options(program=program, steps=6, resume=True, folder=folder))
    return found["step"], found["digest"]


@pytest.mark.parametrize("program", ["ZeRO(Int8())", "DiLoCo(2)"])
def test_two_processes_save_and_three_load(program: str, tmp_path: Path) -> None:
    on_ranks(save, 2, tmp_path, program)
    (tmp_path / "random_states_2.pkl").write_bytes((tmp_path / "random_states_1.pkl").read_bytes())
    results = on_ranks(load, 3, tmp_path, program)
    assert results == [(6, results[0][1])] * 3


def without(rank: int, folder: Path) -> list[str]:
    """Load a checkpoint that has no state of a wire, then save and load one that has."""
    messages = thinwires_messages()
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(folder / "before"))
    wire = attach(accelerator, model, thinwire.Int8())
    accelerator.load_state(str(folder / "before"))
    assert len(messages) == 1
    model(torch.ones(2, tiny.WIDTH)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(folder / "after"))
    accelerator.wait_for_everyone()  # rank 0 alone writes it
    assert (folder / "after" / "custom_checkpoint_0.pkl").exists()
    accelerator.load_state(str(folder / "after"))
    assert wire.step == 1
    return messages


def test_a_checkpoint_without_the_wire_is_loaded_and_reported_once(tmp_path: Path) -> None:
    for messages in on_ranks(without, 2, tmp_path):
        assert len(messages) == 1
        assert "before has no state of thinwire" in messages[0]
    shutil.rmtree(tmp_path)


def refused(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(
        thinwire.AttachError, match=r"not a Sequential: wrap it.*what prepare\(model\) returns"
    ):
        attach(accelerator, tiny.model(), thinwire.Int8())
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[hook])
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(thinwire.AttachError, match="has the communication hook 'fp16_compress_hook' already"):
        attach(accelerator, model, thinwire.Int8())
    for kind, message in (
        ("FSDP", r"leave out fsdp_plugin, and use thinwire\.ZeRO\(\)"),
        ("DEEPSPEED", r"leave out deepspeed_plugin, and use thinwire\.ZeRO\(\)"),
        ("NO", "start the script with `accelerate launch --num_processes 2`"),
    ):
        accelerator.state.distributed_type = type(accelerator.distributed_type)(kind)
        with pytest.raises(thinwire.AttachError, match=message):
            attach(accelerator, model, thinwire.Int8())


def test_what_has_no_ddp_is_refused_with_the_way_out() -> None:
    on_ranks(refused, 2)
