"""Applies saved states to a run. Either all ranks apply a wire's state, or none does.

States that users load into their optimizers are checked for parts that ZeRO saved.
"""

from typing import Any

from torch.optim import Optimizer

from thinwire.checkpoint.optimizer_state import check_owned, forget_owned
from thinwire.checkpoint.wire_state import all_or_none, memory_for, merge_wire_states, own_states, program_of
from thinwire.engine.comm.agreement import Described
from thinwire.errors import StateError
from thinwire.programs.description import same_program, short
from thinwire.step.buckets import groups_for
from thinwire.step.runner import AttachedRun


def load_state(runner: AttachedRun, state: Any, *, keep_buckets: bool) -> None:
    """Load a saved state. Collective.

    Args:
        runner: The runner of the wire's strategy.
        state: This rank's own state, or the states of all ranks of a job of another size.
        keep_buckets: Whether to keep the saved grouping of parameters into buckets.

    Raises:
        StateError: The state does not fit this wire. Nothing was changed.
        MismatchError: Another rank's state does not fit, or the states were saved at different points.
    """
    communicator, model = runner.communicator, runner.context.model
    known = runner.stages.known(runner.context.auditor.on_excess)
    # Which program continues? Ranks agree on it first: `bound` below is collective, and a rank that bound
    # another strategy, or raised before it, would leave the others waiting.
    with all_or_none(communicator, "load_state_dict") as agreed:
        programs = [Described(text, short(config)) for text, config in known.items()]
        resized, states = own_states(state, programs, communicator.rank, communicator.size)
        own = states[0]
        agreed.update(step=str(own["step"]), program=program_of(own))
    config = runner.stages.saved(own["program"], own["step"]) or known[own["program"]]
    same = same_program(config, runner.config)
    strategy = runner.strategy if same else runner.bound(config)
    # Everything that may fail is prepared aside. The running strategy and its memory are still untouched.
    try:
        with all_or_none(communicator, "load_state_dict in full") as agreed:
            own = merge_wire_states(states, strategy.merge) if resized else own
            memory = memory_for(model.tensors(), own)
            groups = groups_for(model.parameters(), own["buckets"] if keep_buckets else [])
            take_over = strategy.prepare(own)
            agreed.update(position=strategy.position(own))
    except BaseException:
        if strategy is not runner.strategy:
            strategy.close()
        raise
    # No rank has raised, so all of them come here and change.
    if own["schedule_ended"]:
        runner.end_schedule()
    runner.resume(strategy)
    runner.context.memory.take_over(memory)
    runner.must_choose_programs = True  # the state may contain leftovers
    runner.steps.restore(own["step"])
    runner.layout.held = runner.layout.upcoming = groups
    take_over()


def check_loaded_states(runner: AttachedRun) -> list[Any]:
    """Check every state that is loaded into the wire's optimizers, and return the hooks' handles.

    The state_dict of a rank's optimizer under ZeRO is a part of the whole. An optimizer that steps other
    parameters too would start their moments from zero.
    """

    def load(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        strategy, stepped = runner.strategy, runner.config.stepped_here(runner.context.target())
        strategy.missing = None
        try:
            check_owned(state, optimizer.param_groups, stepped)
        except StateError as error:
            if not (runner.awaits_optimizers and runner.config.optimizer_state_differs):
                raise
            strategy.missing = str(error)  # raised at the next step, unless this rank's own is loaded before
        groups = [dict(group) for group in state["param_groups"]]
        forget_owned(groups)
        return {**state, "param_groups": groups}

    optimizers = runner.context.optimizers()
    for optimizer in optimizers:
        forget_owned(optimizer.param_groups)  # `attach` has checked states that were loaded before it
    return [optimizer.register_load_state_dict_pre_hook(load) for optimizer in optimizers]
