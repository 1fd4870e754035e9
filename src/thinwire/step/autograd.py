"""The private calls into autograd and optimizers, in one place.

| name | purpose | since |
|---|---|---|
| `_C._current_graph_task_id` | whether autograd runs | 2.6 |
| `Variable._execution_engine` | queues callbacks for the end of backward | 2.6 |
| `Tensor._version` | whether a gradient was changed in place | 2.6 |
| `Optimizer._optimizer_step_pre_hooks` and five more | the hooks of an optimizer that wraps another | 2.6 |

Since: the oldest inspected version that has it. All are in 2.6, 2.9, 2.13 and 2.15. `private` reads them. It
raises UnavailableError with torch's version if a name is missing.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim import Optimizer

from thinwire.version import private

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STATE_HOOKS = {
    "before saving": "_optimizer_state_dict_pre_hooks",
    "after saving": "_optimizer_state_dict_post_hooks",
    "before loading": "_optimizer_load_state_dict_pre_hooks",
    "after loading": "_optimizer_load_state_dict_post_hooks",
}


def in_backward() -> bool:
    """Return whether autograd is running. Ranks without inputs (Join) call hooks outside of it."""
    return bool(private(torch._C, "_current_graph_task_id")() != -1)


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward has computed all gradients, after callbacks queued earlier.

    A callback that is queued by a queued one runs after all that were queued before it.
    """
    private(Variable, "_execution_engine").queue_callback(callback)


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    return int(private(tensor, "_version"))


def step_hooks(optimizer: Optimizer) -> "OrderedDict[int, Any] | None":
    """Return an optimizer's own hooks before steps, or None if it was never initialised."""
    return vars(optimizer).get(_STEP_HOOKS[0])


def no_step_hooks() -> dict[str, Any]:
    """Return the attributes of an optimizer without step hooks."""
    return {name: OrderedDict() for name in _STEP_HOOKS}


def state_hooks(optimizer: Optimizer, when: str) -> list[Callable[..., Any]]:
    """Return an optimizer's hooks `"before saving"`, `"after saving"`, `"before loading"` or after it."""
    return list(private(optimizer, _STATE_HOOKS[when]).values())


def share_state_hooks(wrapper: Optimizer, optimizer: Optimizer) -> None:
    """Share the inner optimizer's hooks for saving and loading with its wrapper, if it has any."""
    for name in _STATE_HOOKS.values():
        setattr(wrapper, name, getattr(optimizer, name, private(wrapper, name)))


def remove_handles(handles: list[Any]) -> None:
    """Remove hooks by their handles, once."""
    for handle in handles:
        handle.remove()
    handles.clear()
