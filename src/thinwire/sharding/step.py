"""Steps some of an optimizer's parameters, whatever the optimizer."""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def step_some(optimizer: Optimizer, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Step just these parameters by these gradients, with the groups' options as they are now.

    State is the optimizer's own, parameter by parameter; options that a step changes are kept. Hooks belong
    to the user's own calls of `step()`, so none runs here. `.grad` is left as it was.
    """
    chosen = {id(parameter) for parameter, _ in gradients}
    split = [
        (group, [one for one in group["params"] if id(one) in chosen]) for group in optimizer.param_groups
    ]
    inner = copy.copy(optimizer)
    inner._optimizer_step_pre_hooks = OrderedDict()
    inner._optimizer_step_post_hooks = OrderedDict()
    inner.param_groups = [{**group, "params": params} for group, params in split if params]
    before = [(parameter, parameter.grad) for parameter, _ in gradients]
    try:
        for parameter, gradient in gradients:
            parameter.grad = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
        type(optimizer).step(inner)  # not the instance's, which an LR scheduler replaces
    finally:
        for parameter, gradient_before in before:
            parameter.grad = gradient_before
    kept = [group for group, params in split if params]
    for group, stepped in zip(kept, inner.param_groups, strict=True):
        group.update(_options(stepped))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
