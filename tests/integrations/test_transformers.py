"""Hugging Face `transformers.Trainer`."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch.amp import GradScaler
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

import thinwire
from examples import tiny, train_transformers
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
from thinwire.integrations.transformers import ThinwireCallback


class Logged(TrainerCallback):
    """Keeps what the trainer logs, as a callback of TensorBoard or W&B receives it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.rows.append({"step": state.global_step, **logs})


def train(options: tiny.Options, *callbacks: Any) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    found = train_transformers.train(options, callbacks)
    torch.distributed.barrier()
    for later in options.folder.glob("checkpoint-[!3]*") if options.save_at else ():
        shutil.rmtree(later, ignore_errors=True)  # the trainer resumes from the latest
    torch.distributed.barrier()
    return found


def runs(rank: int, folder: Path) -> tuple[list[Run], list[dict[str, Any]]]:
    found = run_all(rank, train, folder, inside=True)
    logged = Logged()
    train(tiny.Options(accumulate=2, clip=0.1, compiled=True, folder=folder), logged)
    return found, [row for row in logged.rows if "thinwire/compression" in row]


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    for found, rows in on_ranks(runs, 2, tmp_path):
        for run in found:
            assert run.differences() == [], run
        assert [row["step"] for row in rows] == [2, 4, 6, 8]
        assert of_int8_steps(rows)


def language_model(rank: int, folder: Path) -> tuple[int, str, str]:
    """A GPT-2 with tied weights, evaluated, stopped early, and replaced by the best checkpoint's."""
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 8))]
    args = train_transformers.arguments(tiny.Options(folder=folder, steps=8, save_at=2))
    args.eval_strategy, args.eval_steps, args.load_best_model_at_end = args.save_strategy, 2, True
    args.metric_for_best_model, args.greater_is_better = "eval_loss", True  # so that training gets worse
    thin = ThinwireCallback(thinwire.DiLoCo(4), finalize=True)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[thin, EarlyStoppingCallback(early_stopping_patience=1)],
    )
    trainer.train()
    return trainer.state.global_step, Path(trainer.state.best_model_checkpoint).name, tiny.digest(model)


def test_evaluation_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    first, second = on_ranks(language_model, 2, tmp_path)
    assert first == second, "both ranks have the best model"
    assert first[:2] == (4, "checkpoint-2"), "stopped early"


class AsOnGpu(TrainerCallback):
    """Gives the trainer's accelerator the GradScaler that it has with fp16 on a GPU."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), Trainer):
            assert frame.f_back is not None
            frame = frame.f_back
        accelerator = frame.f_locals["self"].accelerator
        accelerator.native_amp, accelerator.scaler = True, self.scaler
        accelerator.state._mixed_precision = "fp16"


def half(rank: int, folder: Path) -> list[Any]:
    poison(step=5, rank=1)
    results: list[Any] = []
    for name in HALF:
        options = tiny.Options(program=name, clip=0.1, folder=folder / name)
        first, second, scaler = (new_scaler() for _ in range(3))
        trained = train(replace(options, save_at=3), AsOnGpu(first))
        resumed = train(replace(options, resume=True), AsOnGpu(second))
        expected = plain(rank, options, inside=True, lr_every=4, scaler=scaler)
        scales = first.get_scale(), second.get_scale(), scaler.get_scale()
        results.append((trained, resumed, expected, scales))
    return results


def test_a_gradscaler_of_the_trainer_skips_an_overflow_on_all_ranks_and_is_resumed(tmp_path: Path) -> None:
    check_half(on_ranks(half, 2, tmp_path))


def without(rank: int, folder: Path) -> list[str]:
    messages = thinwires_messages()
    train(tiny.Options(save_at=3, folder=folder))
    if rank == 0:
        (folder / "checkpoint-3" / "thinwire.pt").unlink()
    torch.distributed.barrier()
    assert train(tiny.Options(resume=True, folder=folder))["step"] == 5, "of thinwire: they start anew"
    return messages


def test_a_checkpoint_without_the_wire_is_loaded_and_reported_once(tmp_path: Path) -> None:
    first, second = on_ranks(without, 2, tmp_path)
    assert len(first) == 1
    assert "checkpoint-3 has no state of thinwire" in first[0]
    assert second == []


def refused(rank: int, folder: Path) -> list[str]:
    callback = ThinwireCallback(thinwire.Int8())
    messages = [refusal(thinwire.AttachError, callback.on_train_begin, None, None, None)]
    for change in ("is_deepspeed_enabled", "is_fsdp_enabled", "mesh", "no DDP"):
        AcceleratorState._reset_state(reset_partial_state=True)
        args = train_transformers.arguments(tiny.Options(folder=folder))
        trainer = Trainer(train_transformers.WithLoss(), args, train_dataset=tiny.Rows())
        if change == "mesh":
            trainer.accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
        setattr(trainer, change, True)
        messages.append(refusal(thinwire.AttachError, _begin, trainer, callback))
    return messages


def _begin(trainer: Any, callback: Any) -> None:
    """Begin training without `_prepare_for_training`, as a trainer without DDP would."""
    trainer.create_optimizer()
    trainer._inner_training_loop = lambda **_: callback.on_train_begin(trainer.args, None, None)
    trainer.train()


def test_what_has_no_ddp_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for uncalled, deepspeed, fsdp, mesh, unprepared in on_ranks(refused, 2, tmp_path):
        assert "not called by Trainer.train(): pass the callback to" in uncalled
        assert "has deepspeed: leave it out, and use thinwire.ZeRO()" in deepspeed
        assert "has fsdp: leave it out, and use thinwire.ZeRO()" in fsdp
        assert "ParallelismConfig(tp_size=2) trains on a device mesh: leave out parallelism_config" in mesh
        assert "not a WithLoss: wrap it" in unprepared


def single(rank: int, folder: Path) -> str:
    return refusal(thinwire.AttachError, train, tiny.Options(folder=folder))


def test_one_process_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (message,) = on_ranks(single, 1, tmp_path)
    assert "the trainer has one process, and makes no DDP model: start the script with torchrun" in message
