"""Thinwire inside the frameworks that people train with. A module is imported when it is first used.

    accelerate    `attach` after `accelerator.prepare`
    transformers  a callback of `transformers.Trainer`
    lightning     a callback of `lightning.Trainer`
    fabric        `attach` after `fabric.setup`
    torchft       `attach` to a manager: replicas that come and go

`docs/integrations/` has a page for each of them, for Ray Train and for plain torchrun.
"""

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.integrations.metrics import Metrics

__all__ = ["Metrics"]

_MODULES = ("accelerate", "fabric", "lightning", "torchft", "transformers")

if not TYPE_CHECKING:  # a checker that saw __getattr__ would take any misspelt name for a module

    def __getattr__(name: str) -> Any:
        """Import a framework's module on its first use."""
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
