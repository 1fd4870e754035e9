"""Between DDP and the engine: DDP's buckets in, averaged gradients out.

A bridge belongs to one DDP model but does not keep it alive: when the model goes, its thread and process
group go with it.
"""

import hashlib
import json
import weakref
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import MismatchError, UnavailableError, WireError
from thinwire.programs.program import Bucket, Memory, Program, describe, mean_by
from thinwire.version import __version__
from thinwire.wire.agree import Meeting, ranks_text
from thinwire.wire.communicator import Communicator
from thinwire.wire.engine import Engine
from thinwire.wire.meter import Meter

_ATTACH = "attach"
_IN_FULL = " in full"
_REFUSED = "refused"
_SHOWN_DIFFERENCES = 5


class Bridge:
    """Runs a program over each bucket that DDP hands to its hook.

    Making one is collective: the ranks compare set-ups first, then make thinwire's process group.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: dist.ProcessGroup,
        set_up: dict[str, str],
        *,
        limit: timedelta | None = None,
        meter: Meter | None = None,
    ) -> None:
        parameters = parameters_of(ddp)
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.communicator = Communicator(group, limit)
        agree_on(set_up, self.communicator.meeting, self.communicator.limit)
        self.communicator.open()
        device = next(iter(parameters.values())).device
        self.engine = Engine(self.communicator, device=device, meter=meter)
        self._latest = -1
        self._ddp_talks_last = ddp.find_unused_parameters
        weakref.finalize(ddp, self.engine.close)

    def run(
        self, program: Program, grad_bucket: dist.GradBucket, memory: Memory
    ) -> "torch.futures.Future[torch.Tensor]":
        """Start the program on a bucket; the future holds what DDP shall write to the gradients."""
        check_bucket(grad_bucket)
        bucket, last = self._describe(grad_bucket), grad_bucket.is_last()
        self._check_sequence(bucket, last)
        steps = mean_by(program, bucket, memory)
        future = self.engine.submit(steps, label=bucket, last=last, instead=bucket.buffer)
        if last and in_backward():  # a joined rank learns of errors by the futures
            Variable._execution_engine.queue_callback(self._before_ddp_finishes)
        return future

    def _check_sequence(self, bucket: Bucket, last: bool) -> None:
        """DDP hands over a step's buckets in rising order; one that falls back begins another step."""
        if bucket.index <= self._latest:
            raise WireError(
                f"{bucket} came while step {self.engine.step} was not finished: its backward was interrupted"
                f" after bucket {self._latest}, so ranks may have parted ways; resume from a checkpoint"
            )
        self._latest = -1 if last else bucket.index

    def _before_ddp_finishes(self) -> None:
        """Runs ahead of DDP's own final callback, in which it waits and copies bucket after bucket.

        What went wrong is raised after that one: DDP would lose the exception's type. But where DDP itself
        has a collective to wait for there, which parameters were used, it is raised before: that one fails
        too, and names nobody.
        """
        self.engine.guard()
        if self._ddp_talks_last:
            self.engine.settle()
        Variable._execution_engine.queue_callback(self.engine.settle)

    def _describe(self, bucket: dist.GradBucket) -> Bucket:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        return Bucket(
            index=bucket.index(),
            buffer=buffer,
            names=tuple(self.names[id(parameter)] for parameter in parameters),
            shapes=tuple(_shape_in(buffer, parameter) for parameter in parameters),
            rank=self.communicator.rank,
            world_size=self.communicator.size,
            step=self.engine.step,
        )


def in_backward() -> bool:
    """Whether autograd is running: ranks that have run out of inputs (Join) call hooks without it."""
    return torch._C._current_graph_task_id() != -1


def check_bucket(bucket: object) -> None:
    """Refuse what compiled autograd hands to hooks."""
    if not isinstance(bucket, dist.GradBucket):
        raise UnavailableError(
            f"the hook was called with a {type(bucket).__name__}: compiled autograd's Python reducer has no"
            " buckets; set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'"
        )


def _shape_in(buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Size:
    """DDP lays complex gradients out as pairs of real numbers."""
    pairs = parameter.is_complex() and not buffer.is_complex()
    return torch.Size((*parameter.shape, 2)) if pairs else parameter.shape


def parameters_of(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP keeps equal, by their names in the wrapped model.

    Frozen ones too: they may have been frozen after DDP was made, which goes on averaging their gradients.
    """
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    }


def set_up_of(ddp: DistributedDataParallel, program: object, **options: object) -> dict[str, str]:
    """All that must be equal on every rank, as text."""
    return {
        "thinwire version": __version__,
        "torch version": str(torch.__version__),
        "program": describe(program),
        **{f"option {name}": str(value) for name, value in options.items()},
        **{
            f"parameter {name}": f"{tuple(parameter.shape)} {parameter.dtype}"
            for name, parameter in parameters_of(ddp).items()
        },
    }


def agree_on(set_up: dict[str, str], meeting: Meeting, limit: timedelta, topic: str = _ATTACH) -> None:
    """Raise MismatchError on every rank, naming what differs where, unless all ranks say the same."""
    text = json.dumps(set_up)
    digests = meeting.gather(topic, hashlib.sha256(text.encode()).hexdigest(), limit)
    if len(set(digests)) == 1:
        return
    set_ups = [json.loads(story) for story in meeting.gather(topic + _IN_FULL, text, limit)]
    refusals = [
        f"rank {rank} refused: {each[_REFUSED]}" for rank, each in enumerate(set_ups) if _REFUSED in each
    ]
    if refusals:
        raise MismatchError("; ".join(refusals))
    differences = _differences(set_ups) or ["the order of parameters"]
    shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
    more = len(differences) - _SHOWN_DIFFERENCES
    raise MismatchError(
        f"ranks are set up differently: {shown}"
        + (f"; and {more} more" if more > 0 else "")
        + ". Give every rank the same program, options, model and versions"
    )


def decline(reason: str, meeting: Meeting, topic: str = _ATTACH) -> None:
    """Instead of agreeing: leave word, so that the other ranks raise at once rather than wait."""
    text = json.dumps({_REFUSED: reason})
    meeting.post(topic, text)
    meeting.post(topic + _IN_FULL, text)


def _differences(set_ups: list[dict[str, str]]) -> list[str]:
    """One line per key that is not the same on all ranks: which value on which ranks."""
    differences = []
    for key in dict.fromkeys(key for set_up in set_ups for key in set_up):
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, set_up in enumerate(set_ups):
            ranks_by_value[set_up.get(key, "nothing")].append(rank)
        if len(ranks_by_value) > 1:
            sides = [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items()]
            differences.append(f"{key}: {', '.join(sides)}")
    return differences
