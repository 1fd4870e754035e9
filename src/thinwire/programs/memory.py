"""The memory of programs: tensors kept between steps, by parameter name and slot.

A step's changes are committed together or not at all. If a mean is non-finite, the step is rolled back and
memories stay as before it.
"""

from collections.abc import Callable, Collection, Mapping

import torch

from thinwire.amp.loss_scale import Units
from thinwire.errors import ProgramError, StateError

RESIDUAL = "residual"
"""The slot of the residual, for all programs."""
MODEL_SCOPE = "models"
"""The scope of slots that belong to averaged models rather than to gradients."""
_OF_MODELS = f"{MODEL_SCOPE}: "
LEFTOVER = "leftover: "
"""The scope of residuals whose program no longer runs. The next exchange of their parameter adds them."""

Place = tuple[str, str]
"""A parameter's name, and a slot with its scope."""


class Memory:
    """Tensors that programs keep between steps, by parameter name and slot.

    Slots belong to parameter names, so that they survive when DDP rebuilds its buckets.

    >>> memory = Memory()
    >>> memory.slot("fc.weight", "residual", lambda: torch.zeros(2)).add_(1)
    tensor([1., 1.])
    >>> memory.slot("fc.weight", "residual", lambda: torch.zeros(2))
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._scale: torch.Tensor | None = None
        self._slots: dict[str, dict[str, torch.Tensor]] = {}
        self._leftovers: set[Place] = set()
        """The places of leftovers. Looking for them in all slots would cost time in every step."""
        self._scope = ""
        self._loaded = False

    @property
    def scale(self) -> float | None:
        """GradScaler's scale of the residuals, or None without a scaler. The host waits for the value."""
        return None if self._scale is None else float(self._scale.item())

    @scale.setter
    def scale(self, scale: float | None) -> None:
        self._scale = None if scale is None else torch.tensor(scale, dtype=torch.float32, device="cpu")

    def staged(self) -> "Staged":
        """Return a view of this memory for one step.

        Returns:
            A memory whose changes take effect with its `commit`, and are dropped by its `forget`.
        """
        view = Staged(self)
        view._scope = self._scope
        return view

    def slot(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a parameter's tensor, to be changed in place.

        Args:
            name: Name of the parameter.
            key: Slot of the tensor, such as "residual".
            make: Makes the tensor if the slot is empty.

        Returns:
            The tensor that is kept for the next step.
        """
        place = (name, self._scope + key)
        kept = self.find(place)
        if kept is None:
            kept = make()
            self.keep(place, kept)
        return kept

    def read(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a parameter's tensor, to be read only.

        It avoids the copy that `slot` makes for rolling back a step.

        Args:
            name: Name of the parameter.
            key: Slot of the tensor.
            make: Makes the tensor if the slot is empty.

        Returns:
            The tensor as the previous step left it. Do not change it.
        """
        return self.slot(name, key, make)

    def get(self, name: str, key: str) -> torch.Tensor | None:
        """Return a parameter's tensor, to be read only, or None.

        Args:
            name: Name of the parameter.
            key: Slot of the tensor.

        Returns:
            The tensor, or None if the slot is empty.
        """
        return self.find((name, self._scope + key))

    def new_value(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor for a slot's new value.

        Read the old value before this call, which may reuse its memory.

        Args:
            name: Name of the parameter.
            key: Slot of the tensor.
            like: Tensor of the shape, dtype and device of the new value.

        Returns:
            A contiguous tensor that is kept for the next step. Overwrite all of it.
        """
        place = (name, self._scope + key)
        kept = self.find(place)
        if kept is None or not _alike(kept, like):
            kept = _new(like)
            self.keep(place, kept)
        return kept

    def put(self, name: str, key: str, value: torch.Tensor) -> None:
        """Keep a copy of a tensor for the next step.

        Args:
            name: Name of the parameter.
            key: Slot of the tensor.
            value: New value of the slot. It may have another shape or dtype than the old one.
        """
        self.new_value(name, key, value).copy_(value)

    def adopt(self, name: str, key: str, value: torch.Tensor) -> None:
        """Keep a tensor itself for the next step, without the copy that `put` makes.

        Args:
            name: Name of the parameter.
            key: Slot of the tensor.
            value: New value of the slot, contiguous. Do not change it afterwards.
        """
        self.keep((name, self._scope + key), value)

    def scoped(self, scope: str) -> "Memory":
        """Return a view of this memory with slots of its own.

        Use it for programs that run on something other than whole gradients, such as slices of parameters.

        Args:
            scope: Prefix of the slots' names.

        Returns:
            A memory that shares this one's storage.
        """
        view = Memory()
        view._slots, view._leftovers, view._scope = self._slots, self._leftovers, f"{self._scope}{scope}: "
        return view

    def find(self, place: Place) -> torch.Tensor | None:
        """Return the tensor at a place.

        Args:
            place: Name of the parameter, and slot with its full scope.

        Returns:
            The tensor itself, or None if there is none.
        """
        name, key = place
        return self._slots.get(name, {}).get(key)

    def keep(self, place: Place, tensor: torch.Tensor) -> None:
        """Keep a tensor at a place, without a copy.

        Args:
            place: Name of the parameter, and slot with its full scope.
            tensor: Tensor to keep.
        """
        name, key = place
        self._slots.setdefault(name, {})[key] = tensor

    def drop(self, name: str, key: str) -> None:
        """Empty a slot.

        Args:
            name: Name of the parameter.
            key: Slot of the tensor.
        """
        self.remove((name, self._scope + key))

    def remove(self, place: Place) -> None:
        """Empty the slot at a place, if there is a tensor.

        Args:
            place: Name of the parameter, and slot with its full scope.
        """
        name, key = place
        self._slots.get(name, {}).pop(key, None)
        self._leftovers.discard(place)

    def set_aside(self, accepts: Callable[[str], bool]) -> list[str]:
        """Turn the residuals within this memory's scope into leftovers.

        Args:
            accepts: Whether the residual of a slot, named without this memory's scope, can be a leftover.

        Returns:
            The slots that are residuals and were not accepted. They stay as they are.
        """
        declined: dict[str, None] = {}
        for name, slots in self._slots.items():
            for key in [key for key in slots if self._holds_residual(key)]:
                own = key.removeprefix(self._scope)
                if own.startswith(LEFTOVER):
                    continue
                if not accepts(own):
                    declined[own] = None
                    continue
                place = (name, f"{self._scope}{LEFTOVER}{own}")
                # An earlier leftover exists if no step has exchanged the parameter since the last change.
                residual, earlier = slots.pop(key), self.find(place)
                self.keep(place, residual if earlier is None else residual.to(earlier.dtype).add_(earlier))
                self._leftovers.add(place)
        return list(declined)

    @property
    def has_leftovers(self) -> bool:
        """True if there is a leftover within this memory's scope."""
        return any(key.startswith(self._scope + LEFTOVER) for _, key in self._leftovers)

    def leftovers_of(self, name: str) -> dict[str, torch.Tensor]:
        """Return the leftovers of one parameter within this memory's scope.

        Returns:
            The tensors, to be read only, by the slot that held them.
        """
        prefix = self._scope + LEFTOVER
        found = {key: self.find((name, key)) for key in self._leftover_keys(name) if key.startswith(prefix)}
        return {key.removeprefix(prefix): tensor for key, tensor in found.items() if tensor is not None}

    def _leftover_keys(self, name: str) -> list[str]:
        """Return the slots of a parameter's leftovers of all scopes, in the order of their making."""
        if not self._leftovers:
            return []
        return [key for key in self._slots.get(name, {}) if (name, key) in self._leftovers]

    def residuals(self) -> list[torch.Tensor]:
        """Return the residuals of all parameters within this memory's scope."""
        return [tensor for name in self._slots for tensor in self.residuals_of(name)]

    def residuals_of(self, name: str) -> list[torch.Tensor]:
        """Return the residuals of one parameter within this memory's scope.

        The memory without a scope leaves out residuals of averaged models, because they are not scaled like
        gradients.

        Args:
            name: Name of the parameter.

        Returns:
            The tensors themselves, not copies.
        """
        slots = self._slots.get(name, {})
        return [tensor for key, tensor in slots.items() if self._holds_residual(key)]

    def _holds_residual(self, key: str) -> bool:
        of_models = key.startswith(_OF_MODELS)
        return is_residual(key) and key.startswith(self._scope) and (bool(self._scope) or not of_models)

    def rescale(self, scale: torch.Tensor | None) -> None:
        """Multiply residuals so that they match a new scale of GradScaler.

        It runs inside backward, so both scales stay tensors. An equal scale multiplies by 1, because a
        comparison would make the host wait.

        Args:
            scale: Scale of the next gradients, or None without a scaler. None changes only residuals that
                were loaded, because a run without a scaler may resume one that had a scaler.
        """
        loaded, self._loaded = self._loaded, False
        if scale is None and not loaded:
            return
        # Residuals have the scale of the gradients that they come from. Scales are powers of two, so that the
        # multiplication is exact.
        if self._scale is not None:
            old = self._scale if scale is None else self._scale.to(scale.device, non_blocking=True)
            ratio = old.reciprocal() if scale is None else scale / old
            for residual in self.residuals():
                residual.mul_(ratio.to(residual.device, non_blocking=True))
        self._scale = scale

    def convert(self, units: Units) -> None:
        """Rescale residuals to the scale of the next gradients.

        Args:
            units: Scales to apply one after another, and whether the present scale is that of another scaler.
        """
        if units.relabelled:
            self._scale = None
        for scale in units.scales:
            self.rescale(scale)

    def take_over(self, other: "Memory") -> None:
        """Replace all tensors by those of another memory, also for views of this one.

        Args:
            other: Memory to take the tensors from, such as one that was just loaded.
        """
        self._slots.clear()
        self._slots.update(other._slots)
        self._leftovers.clear()
        self._leftovers.update(
            (name, key) for name, slots in self._slots.items() for key in slots if _is_leftover(key)
        )
        self._scale, self._loaded = other._scale, True

    def shared(self) -> "Memory":
        """Return a memory with the same tensors, but without residuals.

        All other slots, such as the factors of PowerSGD, are equal on all ranks.
        """
        rest = Memory()
        for name, slots in self._slots.items():
            for key, tensor in slots.items():
                if not is_residual(key):
                    rest.keep((name, key), tensor)
        return rest

    def take_shared(self, other: "Memory") -> None:
        """Replace all tensors except the residuals by those of another memory.

        Args:
            other: The result of `shared`, on this or another rank.
        """
        for slots in self._slots.values():
            for key in [key for key in slots if not is_residual(key)]:
                del slots[key]
        for name, slots in other.shared()._slots.items():
            self._slots.setdefault(name, {}).update(slots)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of all tensors, by parameter name and then by slot.

        Returns:
            A mapping for `load_state_dict`.
        """
        return {
            name: {key: tensor.detach().clone() for key, tensor in slots.items()}
            for name, slots in self._slots.items()
        }

    def load_state_dict(self, state: object, shapes: Mapping[str, torch.Size]) -> None:
        """Replace all tensors by copies of a saved state.

        Args:
            state: The result of `state_dict`.
            shapes: Shapes of the model's parameters by name.

        Raises:
            StateError: The state does not fit these parameters. The memory is unchanged then.
        """
        if not isinstance(state, dict):
            raise StateError(f"memory is a {type(state).__name__}: it must be a dict keyed by parameter name")
        unknown = [str(name) for name in state if name not in shapes]
        if unknown:
            raise StateError(
                f"the state has parameters that this model does not have: {', '.join(unknown[:5])}; it was"
                " saved from another model, or parameters were renamed"
            )
        loaded: dict[str, dict[str, torch.Tensor]] = {}
        for name, slots in state.items():
            tensors = slots.values() if isinstance(slots, dict) else [None]
            if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                raise StateError(f"the state of {name} must be a dict of tensors keyed by slot")
            for residual in (slots[key] for key in slots if is_whole_residual(key)):
                if residual.shape not in (shapes[name], (*shapes[name], 2)):
                    raise StateError(
                        f"the residual of {name} has shape {tuple(residual.shape)}, the parameter"
                        f" {tuple(shapes[name])}: the state was saved from another model"
                    )
            loaded[name] = {str(key): tensor.detach().clone() for key, tensor in slots.items()}
        self._slots = loaded


class Staged(Memory):
    """A view of a memory for one step, whose changes take effect with `commit`.

    `slot` returns copies. `read` and `put` make no extra copy. From a slot's change to the step's end there
    are two tensors, because the old one is kept for rolling back. Between steps there is one.
    """

    def __init__(self, base: Memory) -> None:
        super().__init__()
        self._base = base
        # A second tensor per slot costs memory and no time. Undoing arithmetic would not be exact, and a
        # snapshot before the step would cost a pass over all slots. The old tensor is freed at the step's
        # end, although a new one costs page faults (0.04 ms per 5 MB, up to 3 ms per 25 MB): 4 bytes per
        # parameter less in forward, when activations need memory.
        self._changed: dict[Place, torch.Tensor | None] = {}
        """The step's new tensors. None marks a slot that the step empties."""

    def slot(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a copy of the kept tensor, for this step to change."""
        place = (name, self._scope + key)
        changed = self._changed.get(place)
        if changed is None:
            kept = self.find(place)
            changed = self._changed[place] = make() if kept is None else _new(kept).copy_(kept)
        return changed

    def read(self, name: str, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the kept tensor itself, to be read only."""
        kept = self.find((name, self._scope + key))
        return self.slot(name, key, make) if kept is None else kept

    def new_value(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor for the slot's new value. The kept tensor stays as it is."""
        place = (name, self._scope + key)
        changed = self._changed.get(place)
        if changed is None or not _alike(changed, like):
            changed = self._changed[place] = _new(like)
        return changed

    def scoped(self, scope: str) -> "Memory":
        """Return a view of this step's memory with slots of its own."""
        view = Staged(self._base)
        view._changed, view._scope = self._changed, f"{self._scope}{scope}: "
        return view

    def find(self, place: Place) -> torch.Tensor | None:
        """Return the tensor at a place as this step sees it, or None."""
        return self._changed[place] if place in self._changed else self._base.find(place)

    def remove(self, place: Place) -> None:
        """Empty the slot at a place for this step. `commit` empties it for good."""
        self._changed[place] = None

    @property
    def has_leftovers(self) -> bool:
        """True if the memory has a leftover within this view's scope, as before the step."""
        return any(key.startswith(self._scope + LEFTOVER) for _, key in self._base._leftovers)

    def _leftover_keys(self, name: str) -> list[str]:
        return self._base._leftover_keys(name)

    def keep(self, place: Place, tensor: torch.Tensor) -> None:
        """Keep a tensor at a place for this step, without a copy. A view of this view commits through it."""
        self._changed[place] = tensor

    def residuals_of(self, name: str) -> list[torch.Tensor]:
        """Return the residuals of one parameter as this step leaves them."""
        changed = {key: tensor for (own, key), tensor in self._changed.items() if own == name}
        kept = {key: tensor for key, tensor in self._base._slots.get(name, {}).items() if key not in changed}
        found = {**kept, **changed}.items()
        return [tensor for key, tensor in found if tensor is not None and self._holds_residual(key)]

    def commit(self, but_of: Collection[str] = ()) -> None:
        """Write the step's changes to the memory.

        Args:
            but_of: Names of parameters whose changes are dropped.
        """
        for place, tensor in self._changed.items():
            if place[0] in but_of:
                continue
            if tensor is None:
                self._base.remove(place)
            else:
                self._base.keep(place, tensor)
        self._changed.clear()

    def forget(self) -> None:
        """Drop the step's changes."""
        self._changed.clear()


class NoMemory(Memory):
    """The memory of programs that promise to keep nothing. It is shared by all models and never saved."""

    def keep(self, place: Place, tensor: torch.Tensor) -> None:
        """Raise ProgramError, because the tensor would be shared by all models, and never saved."""
        name, key = place
        raise ProgramError(
            f"the program keeps {key!r} of {name}, but its class sets stateless = True: remove that line, so"
            " that slots are saved, and restored where a step is skipped"
        )

    def scoped(self, scope: str) -> "Memory":
        """Return this memory, which keeps nothing in any scope."""
        return self


def is_residual(slot: str) -> bool:
    """Return whether a slot, with its scope, holds a residual."""
    return slot.rpartition(": ")[2] == RESIDUAL


def is_whole_residual(slot: str) -> bool:
    """Return whether a slot, with its scope, holds the residual of a whole parameter, not of a slice."""
    return slot.removeprefix(_OF_MODELS).removeprefix(LEFTOVER) == RESIDUAL


def is_model_slot(slot: str) -> bool:
    """Return whether a slot, with its scope, belongs to averaged models rather than to gradients."""
    return slot.startswith(_OF_MODELS)


def _is_leftover(slot: str) -> bool:
    return slot.removeprefix(_OF_MODELS).startswith(LEFTOVER)


def _new(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _alike(kept: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether a kept tensor can hold a new value. It must be contiguous and otherwise like `new`."""
    same = kept.shape == new.shape and kept.dtype == new.dtype and kept.device == new.device
    return same and kept.is_contiguous()
