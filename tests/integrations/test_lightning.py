"""Lightning's `Trainer`."""

import logging
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

import thinwire
from examples import tiny, train_lightning
from tests.integrations.frameworks import (
    HALF,
    Inside,
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
from tests.integrations.lightning_rows import Rows
from tests.surface.test_docs import python_blocks
from thinwire.integrations.lightning import ThinwireCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def train(options: tiny.Options, **more: Any) -> dict[str, Any]:
    found = train_lightning.train(options, **more)
    torch.distributed.barrier()
    for later in options.folder.glob("*step=[!3].ckpt") if options.save_at else ():
        later.unlink(missing_ok=True)  # the example resumes from the latest
    torch.distributed.barrier()
    return found


def runs(rank: int, folder: Path) -> tuple[list[Run], list[dict[str, Any]]]:
    found = run_all(rank, train, folder, inside=True)
    rows = Rows()
    train(tiny.Options(accumulate=2, clip=0.1, compiled=True), logger=rows)
    return found, rows.rows


def test_the_example_trains_saves_resumes_and_logs_as_plain_thinwire(tmp_path: Path) -> None:
    for found, rows in on_ranks(runs, 2, tmp_path):
        for run in found:
            assert run.differences() == [], run
        figures = [row for row in rows if "thinwire/compression" in row]
        assert [row["step"] for row in figures] == [1, 3, 5, 7]
        assert [row["step"] for row in rows if "loss" in row] == [1, 3, 5, 7], "at the same steps"
        assert of_int8_steps(figures)


class Validated(train_lightning.Module):
    """Keeps whether ranks validate the same model, and logs a metric that never improves."""

    def __init__(self) -> None:
        super().__init__()
        self.same: list[bool] = []

    def validation_step(self, rows: torch.Tensor, batch: int) -> None:
        self.same.append(same_on_both(self))
        self.log("metric", 1.0)

    def val_dataloader(self) -> Any:
        return DataLoader(tiny.Rows(8), batch_size=8)


def same_on_both(model: Any) -> bool:
    digests: list[Any] = [None, None]
    torch.distributed.all_gather_object(digests, tiny.digest(model))
    return bool(digests[0] == digests[1])


def trainer_of(callbacks: list[Any], **more: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {"logger": False, "enable_checkpointing": False, "max_steps": 6, **quiet, **more}
    return Trainer(**{"accelerator": "cpu", "devices": 2, "strategy": "ddp", **options}, callbacks=callbacks)


def validated(rank: int) -> list[list[bool]]:
    results = []
    for finalize in (True, False):
        model = Validated()
        trainer = trainer_of([ThinwireCallback(thinwire.DiLoCo(8), finalize=finalize)], val_check_interval=2)
        trainer.fit(model)
        trainer.validate(model, verbose=False)
        results.append(model.same)
    return results


def test_averaged_models_are_synchronised_before_validation_if_asked() -> None:
    for asked, not_asked in on_ranks(validated, 2):
        assert asked == [True, True, True, True]
        assert not_asked == [False, False, False, True], "the last is after the end"


class AtTheEnd(Callback):
    """Keeps whether both ranks have the same model when training ends."""

    same = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.same = same_on_both(pl_module)


def stopped(rank: int) -> tuple[int, bool]:
    end = AtTheEnd()
    callbacks = [end, EarlyStopping("metric", patience=1), ThinwireCallback(thinwire.DiLoCo(8))]
    trainer = trainer_of(callbacks, val_check_interval=2)
    trainer.fit(Validated())
    return trainer.global_step, end.same


def test_early_stopping_ends_with_synchronised_models_for_all_callbacks() -> None:
    assert on_ranks(stopped, 2) == [(4, True), (4, True)]


def at_exchanges(**options: Any) -> Any:
    """The callback of the page, every two steps."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(python_blocks("docs/integrations/lightning.md")[1], names)
    callback = names["AtExchanges"](**options)
    callback.period = 2
    return callback


def weights_averaged(rank: int, folder: Path) -> list[Any]:
    """Train 7 steps, so that the end lies between two exchanges, and again from a checkpoint at step 3."""
    results = []
    for program, kind, every in (("Int8()", EMAWeightAveraging, 1), ("DiLoCo(2)", at_exchanges, 2)):
        options = tiny.Options(program=program, steps=7, folder=folder / program)
        trained = train(replace(options, save_at=3), callbacks=[kind(decay=0.5)])
        resumed = train(replace(options, resume=True), callbacks=[kind(decay=0.5)])
        average = AveragedModel(Inside(), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
        plain(rank, options, inside=True, lr_every=4, average=average, average_every=every)
        results.append((trained["digest"], resumed["digest"], tiny.digest(average)))
    return results


def test_weight_averaging_follows_the_models_that_ranks_share(tmp_path: Path) -> None:
    for results in on_ranks(weights_averaged, 2, tmp_path):
        for trained, resumed, expected in results:
            assert trained == resumed == expected


def own_weights_averaged(rank: int) -> list[str]:
    def fit(callback: Any) -> None:
        trainer_of([callback, ThinwireCallback(thinwire.DiLoCo(2))]).fit(train_lightning.Module())

    callbacks = WeightAveraging(), EMAWeightAveraging(), StochasticWeightAveraging(0.01, 1)
    return [refusal(thinwire.UnavailableError, fit, one) for one in callbacks]


def test_weight_averaging_of_each_ranks_own_model_is_refused() -> None:
    names = "WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"
    for messages in on_ranks(own_weights_averaged, 2):
        for name, message in zip(names, messages, strict=True):
            assert message.startswith(f"{name} would average each rank's own model")


def in_epochs(rank: int) -> list[bool]:
    model = train_lightning.Module()
    swa = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    options = {"max_epochs": 3, "max_steps": -1, "limit_train_batches": 2}
    trainer_of([swa, ThinwireCallback(thinwire.Int8())], **options).fit(model)
    return [same_on_both(model), tiny.digest(model) == tiny.digest(swa._average_model)]


def test_stochastic_weight_averaging_ends_with_the_average() -> None:
    assert on_ranks(in_epochs, 2) == [[True, True], [True, True]]


def half(rank: int, folder: Path) -> list[Any]:
    poison(step=5, rank=1)
    results: list[Any] = []
    for name in HALF:
        options = tiny.Options(program=name, clip=0.1, folder=folder / name)
        first, second, scaler = (new_scaler() for _ in range(3))
        plugins = [[MixedPrecision("16-mixed", "cpu", one)] for one in (first, second)]
        trained = train(replace(options, save_at=3), plugins=plugins[0])
        resumed = train(replace(options, resume=True), plugins=plugins[1])
        expected = plain(rank, options, inside=True, lr_every=4, scaler=scaler)
        scales = first.get_scale(), second.get_scale(), scaler.get_scale()
        results.append((trained, resumed, expected, scales))
    return results


def test_a_gradscaler_of_lightning_skips_an_overflow_on_all_ranks_and_is_resumed(tmp_path: Path) -> None:
    check_half(on_ranks(half, 2, tmp_path))


def no_half(rank: int) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin = trainer_of([], precision="16-mixed").precision_plugin
    return plugin.scaler, [str(one.message) for one in caught]


def test_fp16_on_cpu_becomes_bf16_by_lightning_itself() -> None:
    for scaler, messages in on_ranks(no_half, 2):
        assert scaler is None
        assert any("fp16 is not supported on CPU. Using `precision='bf16-mixed'`" in one for one in messages)


def clipped(rank: int) -> list[str]:
    programs = "Exact()", "ZeRO()"
    return [
        train(tiny.Options(program=one, steps=4, clip=0.001), gradient_clip_algorithm="value")["digest"]
        for one in programs
    ]


def test_gradients_are_clipped_by_value_under_zero_as_without() -> None:
    for exact, zero in on_ranks(clipped, 2):
        assert zero == exact


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


def hooked(rank: int) -> list[str]:
    messages = thinwires_messages()
    strategy = DDPStrategy(ddp_comm_hook=fp16_compress_hook)
    trainer = trainer_of([ThinwireCallback(thinwire.Int8())], max_steps=1, strategy=strategy)
    trainer.fit(train_lightning.Module())
    return messages


def test_a_hook_that_lightning_ignores_is_named() -> None:
    for messages in on_ranks(hooked, 2):
        assert messages == [
            "DDPStrategy(ddp_comm_hook=...) is ignored by Lightning on cpu: thinwire exchanges gradients"
        ]


class Configured(train_lightning.Module):
    """As a model-parallel strategy asks for."""

    def configure_model(self) -> None:
        pass


def refused(rank: int, devices: int) -> str:
    strategy = "auto" if devices == 1 else ModelParallelStrategy(1, 2)
    trainer = trainer_of([ThinwireCallback(thinwire.Int8())], devices=devices, strategy=strategy)
    return refusal(thinwire.AttachError, trainer.fit, Configured())


@pytest.mark.parametrize(("devices", "name"), [(1, "SingleDeviceStrategy"), (2, "ModelParallelStrategy")])
def test_what_has_no_ddp_is_refused_with_the_way_out(devices: int, name: str) -> None:
    for message in on_ranks(refused, devices, devices):
        assert f'the trainer\'s strategy is {name}: use Trainer(strategy="ddp", devices=2) or more' in message


def closures(rank: int) -> list[str]:
    programs = "ZeRO(interleaved=True)", "ZeRO(parameters=torch.bfloat16)"
    options = [tiny.Options(program=one) for one in programs]
    return [refusal(thinwire.UnavailableError, train_lightning.train, one) for one in options]


def test_forms_of_zero_that_allow_no_closure_are_refused() -> None:
    """Lightning's optimizer steps run forward and backward inside a closure."""
    for messages in on_ranks(closures, 2):
        for message in messages:
            assert "step(closure) was called, but with ZeRO" in message
