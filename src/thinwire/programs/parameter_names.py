"""Names of parameters and buffers without the prefixes that `torch.compile` adds."""

from typing import Any

_COMPILED = "_orig_mod"
"""Attribute of torch.compile's wrapper that holds the module."""


def original_name(name: str) -> str:
    """Return the name without the prefixes of torch.compile.

    >>> original_name("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def with_original_names(state: Any) -> Any:
    """Return a saved state whose keys and lists of names have no prefixes of torch.compile."""
    if isinstance(state, dict):
        keys = (original_name(key) if isinstance(key, str) else key for key in state)
        return dict(zip(keys, map(with_original_names, state.values()), strict=True))
    if isinstance(state, list):
        return [original_name(one) if isinstance(one, str) else with_original_names(one) for one in state]
    return state
