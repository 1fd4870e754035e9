"""Lightning's `Trainer`."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

import thinwire
from examples import tiny, train_lightning
from tests.integrations.frameworks import check_metrics, check_runs, on_ranks, thinwires_messages
from tests.integrations.lightning_rows import Rows
from thinwire.integrations.lightning import ThinwireCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def train(options: tiny.Options, **more: Any) -> dict[str, Any]:
    found = train_lightning.train(options, **more)
    torch.distributed.barrier()
    for later in options.folder.glob("*step=[!3].ckpt") if options.save_at else ():
        later.unlink(missing_ok=True)  # the example resumes from the latest
    torch.distributed.barrier()
    return found


def runs(rank: int, folder: Path) -> None:
    check_runs(rank, train, folder, inside=True)
    rows = Rows()
    train(tiny.Options(accumulate=2, clip=0.1, compiled=True), logger=rows)
    figures = [row for row in rows.rows if "thinwire/compression" in row]
    assert [row["step"] for row in figures] == [1, 3, 5, 7]
    assert [row["step"] for row in rows.rows if "loss" in row] == [1, 3, 5, 7], "at the same steps"
    check_metrics(figures)


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    on_ranks(runs, 2, tmp_path)


class Validated(train_lightning.Module):
    """Validates after every two steps, and keeps whether ranks validate the same model."""

    def __init__(self) -> None:
        super().__init__()
        self.same: list[bool] = []

    def validation_step(self, rows: torch.Tensor, batch: int) -> None:
        digests: list[Any] = [None, None]
        torch.distributed.all_gather_object(digests, tiny.digest(self))
        self.same.append(digests[0] == digests[1])

    def val_dataloader(self) -> Any:
        return DataLoader(tiny.Rows(8), batch_size=8)


def validated(rank: int, folder: Path) -> None:
    for finalize in (True, False):
        model = Validated()
        callback = ThinwireCallback(thinwire.DiLoCo(8), finalize=finalize)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_steps": 6}
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            val_check_interval=2,
            callbacks=[callback],
            **options,
            **quiet,
        )
        trainer.fit(model)
        trainer.validate(model, verbose=False)
        assert model.same == [finalize] * 2 + [finalize, True], "the last is after the end"


def test_averaged_models_are_synchronised_before_validation_if_asked(tmp_path: Path) -> None:
    on_ranks(validated, 2, tmp_path)


def without(rank: int, folder: Path) -> list[str]:
    messages = thinwires_messages()
    train(tiny.Options(save_at=3, folder=folder))
    (path,) = folder.glob("*.ckpt")
    torch.distributed.barrier()
    if rank == 0:
        saved = torch.load(path, weights_only=False)
        del saved["callbacks"]["ThinwireCallback"]
        torch.save(saved, path)
    torch.distributed.barrier()
    assert train(tiny.Options(resume=True, folder=folder))["step"] == 5, "of thinwire: they start anew"
    return messages


def test_a_checkpoint_without_the_wire_is_loaded_and_reported_once(tmp_path: Path) -> None:
    first, second = on_ranks(without, 2, tmp_path)
    assert len(first) == 1
    assert "step=3.ckpt has no state of thinwire" in first[0]
    assert second == []
    shutil.rmtree(tmp_path)


def refused(rank: int) -> list[str]:
    messages = thinwires_messages()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(ddp_comm_hook=fp16_compress_hook),
        max_steps=1,
        callbacks=[ThinwireCallback(thinwire.Int8())],
        **quiet,
    )
    trainer.fit(train_lightning.Module())
    trainer.strategy.model = train_lightning.Module()
    with pytest.raises(thinwire.AttachError, match=r'give Trainer\(strategy="ddp", devices=2\) or more'):
        ThinwireCallback(thinwire.Int8()).on_train_start(trainer, None)
    return messages


def closures(rank: int) -> None:
    for program in ("ZeRO(interleaved=True)", "ZeRO(parameters=torch.bfloat16)"):
        with pytest.raises(thinwire.UnavailableError, match=r"step\(closure\) was called, but with ZeRO"):
            train_lightning.train(tiny.Options(program=program))


def test_forms_of_zero_that_allow_no_closure_are_refused() -> None:
    """Lightning's optimizer steps run forward and backward inside a closure."""
    on_ranks(closures, 2)


def test_no_ddp_is_refused_and_an_ignored_hook_is_named() -> None:
    for messages in on_ranks(refused, 2):
        assert messages == [
            "DDPStrategy(ddp_comm_hook=...) is ignored by Lightning on cpu: thinwire exchanges gradients"
        ]
