"""A logger for Lightning's Trainer and for Fabric."""

from typing import Any

from lightning.pytorch.loggers import Logger


class Rows(Logger):
    """A logger that keeps what it is given."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step, **metrics})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass
