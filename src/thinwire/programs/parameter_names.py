"""Names of parameters and buffers without the prefixes that `torch.compile` adds."""

_COMPILED = "_orig_mod"
"""Attribute of torch.compile's wrapper that holds the module."""


def original_name(name: str) -> str:
    """Return the name without the prefixes of torch.compile.

    >>> original_name("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)
