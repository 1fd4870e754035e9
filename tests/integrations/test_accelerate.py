"""Hugging Face Accelerate."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DDPCommunicationHookType
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire
from examples import tiny, train_accelerate
from tests.integrations.frameworks import (
    HALF,
    Run,
    check_half,
    new_scaler,
    of_int8_steps,
    on_ranks,
    plain,
    poison,
    refusal,
    run_all,
    thinwires_messages,
)
from tests.surface.test_docs import ROOT
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


def runs(rank: int, folder: Path) -> tuple[list[Run], list[dict[str, Any]]]:
    found = run_all(rank, train, folder, lr_every=2)  # Accelerate steps a scheduler once for each process
    tracker = Rows()
    train(tiny.Options(accumulate=2, clip=0.1, compiled=True), log_with=tracker)
    return found, tracker.rows


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    for rank, (found, rows) in enumerate(on_ranks(runs, 2, tmp_path)):
        for run in found:
            assert run.differences() == [], run
        assert [row["step"] for row in rows] == ([] if rank else list(range(1, 9)))
        assert of_int8_steps(rows)


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


class Job:
    """A model that is prepared and attached as in a user's loop."""

    def __init__(self, program: Any, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, **options)
        if options.get("mixed_precision") == "fp16":  # as on an accelerator: on CPU it makes no scaler
            self.accelerator.native_amp = True
            self.accelerator.scaler = new_scaler()
        model = tiny.model()
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        self.wire = attach(self.accelerator, self.model, program)

    def train(self, begin: int, end: int, clip: Any = lambda job: None) -> dict[str, Any]:
        for step in range(begin, end):
            rows = tiny.Rows().rows[8 * (2 * step + self.accelerator.process_index) :][:8]
            self.accelerator.backward(tiny.loss_of(self.model(rows), rows))
            clip(self)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.wire.finalize()
        return tiny.result(self.wire, self.accelerator.unwrap_model(self.model))


def by_norm(job: Job) -> None:
    job.accelerator.clip_grad_norm_(job.model.parameters(), 0.1)


def by_value(job: Job) -> None:
    job.accelerator.clip_grad_value_(job.model.parameters(), 0.001)


def half(rank: int, folder: Path) -> list[Any]:
    poison(step=5, rank=1)
    results: list[Any] = []
    for name in HALF:
        options = tiny.Options(program=name, clip=0.1)
        program = tiny.program(options)
        job = Job(program, mixed_precision="fp16")
        job.train(0, 3, by_norm)
        job.accelerator.save_state(str(folder / "saved"))
        job.accelerator.wait_for_everyone()
        trained = job.train(3, 8, by_norm)
        again = Job(program, mixed_precision="fp16")
        again.accelerator.load_state(str(folder / "saved"))
        resumed = again.train(3, 8, by_norm)
        scaler = new_scaler()
        expected = plain(rank, options, inside=False, lr_every=1000, scaler=scaler)
        scales = job.accelerator.scaler.get_scale(), scaler.get_scale()
        results.append((trained, resumed, expected, scales))
    return results


def test_a_gradscaler_of_accelerate_skips_an_overflow_on_all_ranks_and_is_resumed(tmp_path: Path) -> None:
    check_half(on_ranks(half, 2, tmp_path))


def no_half(rank: int) -> Any:
    return Accelerator(cpu=True, mixed_precision="fp16").scaler


def test_fp16_on_cpu_is_left_out_by_accelerate_itself() -> None:
    assert on_ranks(no_half, 2) == [None, None]


def clipped(rank: int) -> list[str]:
    return [Job(program).train(0, 4, by_value)["digest"] for program in (thinwire.Exact(), thinwire.ZeRO())]


def test_gradients_are_clipped_by_value_under_zero_as_without() -> None:
    for exact, zero in on_ranks(clipped, 2):
        assert zero == exact


def part(rank: int) -> str:
    job = Job(thinwire.ZeRO())
    some = list(job.model.parameters())[:1]
    return refusal(thinwire.OptionError, job.accelerator.clip_grad_norm_, some, 1.0)


def test_a_part_of_a_model_under_zero_cannot_be_clipped_by_norm() -> None:
    for message in on_ranks(part, 2):
        assert "clip_grad_norm_ received 1 of 4 trained parameters" in message


def averaged(rank: int) -> tuple[str, str]:
    job = Job(thinwire.Int8())
    own = AveragedModel(job.accelerator.unwrap_model(job.model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    job.train(0, 2)
    own.update_parameters(job.accelerator.unwrap_model(job.model))
    after = tiny.digest(own.module)
    job.train(2, 4)
    own.update_parameters(job.accelerator.unwrap_model(job.model))
    return after, tiny.digest(own.module)


def test_torchs_averaged_model_follows_the_unwrapped_model() -> None:
    (after, later), other = on_ranks(averaged, 2)
    assert other == (after, later)
    assert after != later


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


def refused(rank: int) -> list[str]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    messages = [refusal(thinwire.AttachError, attach, accelerator, tiny.model(), thinwire.Int8())]
    AcceleratorState._reset_state(reset_partial_state=True)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[hook])
    model = accelerator.prepare(nn.Linear(2, 2))
    messages.append(refusal(thinwire.AttachError, attach, accelerator, model, thinwire.Int8()))
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "NO"):
        accelerator.state.distributed_type = type(accelerator.distributed_type)(kind)
        messages.append(refusal(thinwire.AttachError, attach, accelerator, model, thinwire.Int8()))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)  # on CPU Accelerate refuses it itself
    messages.append(refusal(thinwire.AttachError, attach, accelerator, model, thinwire.Int8()))
    return messages


def test_what_has_no_ddp_is_refused_with_the_way_out() -> None:
    for messages in on_ranks(refused, 2):
        unprepared, hooked, fsdp, deepspeed, megatron, single, mesh = messages
        assert "not a Sequential: wrap it" in unprepared
        assert "attach to the model of prepare()" in unprepared
        assert "has the communication hook 'fp16_compress_hook' already" in hooked
        assert "leave out fsdp_plugin, and use thinwire.ZeRO()" in fsdp
        assert "leave out deepspeed_plugin, and use thinwire.ZeRO()" in deepspeed
        assert "leave out megatron_lm_plugin" in megatron
        assert "start the script with `torchrun --nproc-per-node 2`" in single
        assert "ParallelismConfig(tp_size=2) trains on a device mesh: leave out parallelism_config" in mesh


def test_accelerate_launch_starts_two_processes_on_cpu() -> None:
    """`--cpu` would start one, whatever `--num_processes` is."""
    flags = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), "--main_process_port", "0"]
    script = [str(ROOT / "examples" / "train_accelerate.py"), "--steps", "2"]
    run = subprocess.run([*command, *script], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [one["step"] for one in results] == [2, 2]
    assert results[0]["digest"] == results[1]["digest"]
