"""What programs keep between steps: tensors, by parameter name and slot.

A step's changes hold together or not at all: where a gradient is infinite or NaN on some rank, the step did
not happen, and nothing of it is remembered.
"""

from collections.abc import Callable, Collection, Mapping

import torch

from thinwire.errors import StateError

RESIDUAL = "residual"
"""The slot of what compression has not sent yet, of whatever program."""
MODELS = "models"
"""The scope of what programs remember of models that they average, beside what they do of gradients."""
MODELS_RESIDUAL = f"{MODELS}: {RESIDUAL}"

Place = tuple[str, str]
"""A parameter's name and a slot, with its scope."""


class Memory:
    """All that programs keep between steps.

    >>> memory = Memory()
    >>> memory.slot("fc.weight", "residual", lambda: torch.zeros(2)).add_(1)
    tensor([1., 1.])
    >>> memory.slot("fc.weight", "residual", lambda: torch.zeros(2))
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self.scale: float | None = None
        """The GradScaler's scale that residuals are in; None where there is none."""
        self._slots: dict[str, dict[str, torch.Tensor]] = {}
        self._scope = ""
        self._spare: dict[Place, torch.Tensor] = {}
        self._loaded = False

    def staged(self) -> "Staged":
        """This memory for one step, which may turn out not to count."""
        view = Staged(self, self._spare)
        view._scope = self._scope
        return view

    def slot(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor kept for a parameter under `key`, made by `make` the first time; change it in place."""
        place = (name, self._scope + key)
        kept = self.find(place)
        if kept is None:
            kept = make()
            self.keep(place, kept)
        return kept

    def read(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As `slot`, but not to be changed: spares the copy that `slot` makes to be able to forget a step."""
        return self.slot(name, key, make)

    def room(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
        """Room for what is kept under `key` from now on, shaped as `like`: fill all of it.

        What was kept there may be gone: read that before.
        """
        place = (name, self._scope + key)
        kept = self.find(place)
        if kept is None or not _alike(kept, like):
            kept = torch.empty_like(like, memory_format=torch.contiguous_format)
            self.keep(place, kept)
        return kept

    def put(self, name: str, key: str, value: torch.Tensor) -> None:
        """Keep a copy of `value` under `key` from now on."""
        self.room(name, key, value).copy_(value)

    def scoped(self, scope: str) -> "Memory":
        """The same memory for a program that sees something else than whole parameters: slots of its own."""
        view = Memory()
        view._slots, view._scope = self._slots, f"{self._scope}{scope}: "
        return view

    def find(self, place: Place) -> torch.Tensor | None:
        """What is kept at a place, if anything."""
        name, key = place
        return self._slots.get(name, {}).get(key)

    def keep(self, place: Place, tensor: torch.Tensor) -> None:
        """Keep this very tensor at a place."""
        name, key = place
        self._slots.setdefault(name, {})[key] = tensor

    def residuals(self) -> list[torch.Tensor]:
        """What is still owed of gradients, in whatever scope."""
        return [tensor for name in self._slots for tensor in self.residuals_of(name)]

    def residuals_of(self, name: str) -> list[torch.Tensor]:
        """What is still owed of one parameter, within this memory's scope."""
        slots = self._slots.get(name, {})
        return [tensor for key, tensor in slots.items() if self._owes(key)]

    def _owes(self, key: str) -> bool:
        of_models = key.startswith(f"{MODELS}: ")
        return is_residual(key) and key.startswith(self._scope) and (bool(self._scope) or not of_models)

    def rescale(self, scale: float | None) -> None:
        """Residuals in the units of gradients to come: a GradScaler's scale has changed, or is new.

        None leaves them as they are, unless they were loaded: then it is a run without a scaler that goes on
        from one with.
        """
        loaded, self._loaded = self._loaded, False
        if scale is None and not loaded:
            return
        if self.scale is not None and scale != self.scale:
            for residual in self.residuals():
                residual.mul_((scale or 1.0) / self.scale)
        self.scale = scale

    def take_over(self, other: "Memory") -> None:
        """Hold what `other` holds, for all views of this memory too."""
        self._slots.clear()
        self._slots.update(other._slots)
        self.scale, self._loaded = other.scale, True

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of everything kept, by parameter name, then slot."""
        return {
            name: {key: tensor.detach().clone() for key, tensor in slots.items()}
            for name, slots in self._slots.items()
        }

    def load_state_dict(self, state: object, shapes: Mapping[str, torch.Size]) -> None:
        """Replace everything kept; on a state that does not fit parameters of these shapes, raise first."""
        if not isinstance(state, dict):
            raise StateError(f"memory is a {type(state).__name__}: it must be a dict by parameter name")
        unknown = [str(name) for name in state if name not in shapes]
        if unknown:
            raise StateError(
                f"the state has parameters that this model has not: {', '.join(unknown[:5])}; it was"
                " saved from another model, or parameters were renamed"
            )
        loaded: dict[str, dict[str, torch.Tensor]] = {}
        for name, slots in state.items():
            tensors = slots.values() if isinstance(slots, dict) else [None]
            if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                raise StateError(f"the state of {name} must be a dict of tensors by slot")
            for residual in (slots[key] for key in (RESIDUAL, MODELS_RESIDUAL) if key in slots):
                if residual.shape not in (shapes[name], (*shapes[name], 2)):
                    raise StateError(
                        f"the residual of {name} has shape {tuple(residual.shape)}, the parameter"
                        f" {tuple(shapes[name])}: the state was saved from another model"
                    )
            loaded[name] = {str(key): tensor.detach().clone() for key, tensor in slots.items()}
        self._slots = loaded


class Staged(Memory):
    """A memory as one step sees it: what the step changes is set aside until `commit`, or forgotten.

    Programs that use `slot` work on copies. Those that `read` and `put` pay nothing for it in time; what they
    replace is kept for the next step to write to, so a slot takes its memory twice.
    """

    def __init__(self, base: Memory, spare: dict[Place, torch.Tensor]) -> None:
        super().__init__()
        self._base = base
        self._spare = spare
        self._changed: dict[Place, torch.Tensor] = {}

    def slot(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A copy of the tensor kept, for this step to change."""
        place = (name, self._scope + key)
        if place not in self._changed:
            kept = self._base.find(place)
            self._changed[place] = make() if kept is None else self._free(place, kept).copy_(kept)
        return self._changed[place]

    def read(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor kept itself."""
        kept = self.find((name, self._scope + key))
        return self.slot(name, key, make) if kept is None else kept

    def room(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
        """Room beside what is kept."""
        place = (name, self._scope + key)
        changed = self._changed.get(place)
        if changed is None or not _alike(changed, like):
            changed = self._changed[place] = self._free(place, like)
        return changed

    def scoped(self, scope: str) -> "Memory":
        """As `Memory.scoped`."""
        view = Staged(self._base, self._spare)
        view._changed, view._scope = self._changed, f"{self._scope}{scope}: "
        return view

    def find(self, place: Place) -> torch.Tensor | None:
        """As this step sees it."""
        changed = self._changed.get(place)
        return self._base.find(place) if changed is None else changed

    def residuals_of(self, name: str) -> list[torch.Tensor]:
        """As this step leaves them."""
        changed = {key: tensor for (own, key), tensor in self._changed.items() if own == name}
        kept = {key: tensor for key, tensor in self._base._slots.get(name, {}).items() if key not in changed}
        return [tensor for key, tensor in {**kept, **changed}.items() if self._owes(key)]

    def commit(self, but_of: Collection[str] = ()) -> None:
        """Let the changes hold, but for those of some parameters."""
        for place, tensor in self._changed.items():
            if place[0] in but_of:
                self._spare[place] = tensor
                continue
            replaced = self._base.find(place)
            if replaced is not None:
                self._spare[place] = replaced
            self._base.keep(place, tensor)
        self._changed.clear()

    def forget(self) -> None:
        """As if the step had not been."""
        self._spare.update(self._changed)
        self._changed.clear()

    def _free(self, place: Place, like: torch.Tensor) -> torch.Tensor:
        spare = self._spare.pop(place, None)
        if spare is not None and _alike(spare, like):
            return spare
        return torch.empty_like(like, memory_format=torch.contiguous_format)


def is_residual(slot: str) -> bool:
    """Whether a slot, with its scope, holds what compression has not sent yet."""
    return slot.rpartition(": ")[2] == RESIDUAL


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
