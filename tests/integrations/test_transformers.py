"""Hugging Face `transformers.Trainer`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

import thinwire
from examples import tiny, train_transformers
from tests.integrations.frameworks import check_metrics, check_runs, on_ranks, thinwires_messages
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


def runs(rank: int, folder: Path) -> None:
    check_runs(rank, train, folder, inside=True)
    logged = Logged()
    train(tiny.Options(accumulate=2, clip=0.1, compiled=True, folder=folder), logged)
    rows = [row for row in logged.rows if "thinwire/compression" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    check_metrics(rows)


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    on_ranks(runs, 2, tmp_path)


def language_model(rank: int, folder: Path) -> None:
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
    assert trainer.state.global_step == 4, "stopped early"
    digests: list[Any] = [None, None]
    torch.distributed.all_gather_object(digests, tiny.digest(model))
    assert digests[0] == digests[1]
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-2")


def test_evaluation_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    on_ranks(language_model, 2, tmp_path)


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


def refused(rank: int, folder: Path) -> None:
    callback = ThinwireCallback(thinwire.Int8())
    with pytest.raises(thinwire.AttachError, match=r"not called by Trainer\.train\(\): give the callback to"):
        callback.on_train_begin(None, None, None)
    args = train_transformers.arguments(tiny.Options(folder=folder))
    for name, message in (
        ("is_deepspeed_enabled", r"has deepspeed: leave it out, and use thinwire\.ZeRO\(\)"),
        ("is_fsdp_enabled", r"has fsdp: leave it out, and use thinwire\.ZeRO\(\)"),
    ):
        trainer = Trainer(train_transformers.WithLoss(), args, train_dataset=tiny.Rows())
        setattr(trainer, name, True)
        with pytest.raises(thinwire.AttachError, match=message):
            _begin(trainer, callback)
    trainer = Trainer(train_transformers.WithLoss(), args, train_dataset=tiny.Rows())
    with pytest.raises(thinwire.AttachError, match="not a WithLoss: wrap it"):
        _begin(trainer, callback)


def _begin(trainer: Any, callback: Any) -> None:
    """Begin training without `_prepare_for_training`, as a trainer without DDP would."""
    trainer.create_optimizer()
    trainer._inner_training_loop = lambda **_: callback.on_train_begin(trainer.args, None, None)
    trainer.train()


def test_what_has_no_ddp_is_refused_with_the_way_out(tmp_path: Path) -> None:
    on_ranks(refused, 2, tmp_path)
