"""Looks into saved states without knowing their layout."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


def leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All that is in nested dicts, lists and tuples, with the keys that lead to it."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from leaves(value, (*path, str(number)))
    else:
        yield path, state


def tensors(state: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Every tensor, with the keys that lead to it."""
    return ((path, leaf) for path, leaf in leaves(state) if isinstance(leaf, torch.Tensor))


def not_finite(state: Any) -> list[str]:
    """Where infinite numbers and NaN are."""
    return ["/".join(path) for path, one in tensors(state) if not one.isfinite().all()]


def residuals(state: Any) -> dict[tuple[str, ...], torch.Tensor]:
    """What compression has not sent yet, by parameter and slot, in units of unscaled gradients."""
    return {path[-2:]: one for path, one in tensors(unscaled(state)) if _of_residual(path)}


def unscaled(state: Any) -> Any:
    """A state with its residuals divided by the loss scale that it names, a power of two.

    The scale at which residuals are kept tells nothing: they follow the scaler when they are next used.
    """
    if not isinstance(state, Mapping):
        return [unscaled(one) for one in state] if isinstance(state, list | tuple) else state
    scale = state.get("scale") if "memory" in state else None
    if scale is None:
        return {key: unscaled(value) for key, value in state.items()}
    memory = {
        name: {
            slot: one / scale if _of_residual((name, slot)) and not slot.startswith("model") else one
            for slot, one in slots.items()
        }
        for name, slots in state["memory"].items()
    }
    return {**state, "scale": None, "memory": memory}


def _of_residual(path: tuple[str, ...]) -> bool:
    return path[-1].split(": ")[-1] == "residual"


def digest(state: Any) -> str:
    """Equal for states that are equal bit by bit, and for no others."""
    text = hashlib.sha256()
    _feed(text, state)
    return text.hexdigest()


def _feed(text: Any, state: Any) -> None:
    if isinstance(state, torch.Tensor):
        text.update(f"{state.dtype} {tuple(state.shape)}".encode())
        text.update(state.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(state, Mapping):
        for key in sorted(state, key=str):
            text.update(f"{{{key}:".encode())
            _feed(text, state[key])
    elif isinstance(state, list | tuple):
        text.update(f"[{len(state)}".encode())
        for value in state:
            _feed(text, value)
    else:
        text.update(f"{type(state).__name__} {state!r}".encode())


def different(one: Any, other: Any) -> str:
    """The first tensors in which two states differ, and by how much."""
    own, others = dict(tensors(one)), dict(tensors(other))
    lonely = sorted("/".join(path) for path in own.keys() ^ others.keys())
    found = [f"only on one side: {', '.join(lonely[:4])}"] if lonely else []
    for path in own.keys() & others.keys():
        if digest(own[path]) != digest(others[path]):
            gap = (own[path].double() - others[path].double()).abs().max() if own[path].numel() else 0
            found.append(f"{'/'.join(path)} by {gap:.3g}")
    plain, others_plain = dict(leaves(one)), dict(leaves(other))
    for path in (plain.keys() | others_plain.keys()) - own.keys() - others.keys():
        values = plain.get(path), others_plain.get(path)
        if values[0] != values[1]:
            found.append(f"{'/'.join(path)} is {values[0]!r} and {values[1]!r}")
    return "; ".join(sorted(found)[:6])


def place(folder: str, step: int, rank: int, world_size: int) -> Path:
    """Where a rank's checkpoint is."""
    return Path(folder, f"after {step}, {rank} of {world_size}")


def latest(folder: str, world_size: int) -> int | None:
    """The last step after which all ranks have saved."""
    steps = {int(path.name.split()[1].rstrip(",")) for path in Path(folder).glob("after *")}
    whole = [
        step
        for step in steps
        if all(place(folder, step, rank, world_size).exists() for rank in range(world_size))
    ]
    return max(whole, default=None)
