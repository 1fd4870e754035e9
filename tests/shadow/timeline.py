"""A timeline of one backward on a modelled accelerator: which work overlaps with backward and the network.

`python -m tests.shadow.timeline` draws docs/timeline-accelerator.svg and prints its table. The shadow device
records which work comes after which, and a model of a device's speed (`tests.shadow.device.Speed`) gives each
operation its time.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import end_warm_ranks, quiet, run_ranks
from tests.shadow import device
from tests.shadow.device import SHADOW, Span, Speed
from thinwire.engine.scheduler import Scheduler

LAYERS, WIDTH, ROWS = 6, 1024, 2048
"""Each layer is a bucket."""
PATH = Path("docs/timeline-accelerator.svg")
BACKWARD, SIDE, NETWORK = "backward stream", "side stream", "network"
LANES = (BACKWARD, SIDE, NETWORK)
STAGES = ("backward", "encode", "exchange 1", "combine", "exchange 2", "decode")
"""The work of a bucket with Int8, in its order."""
GAP = 10e-6
"""The seconds without work after which a lane's next operation starts a new box."""


class Box(NamedTuple):
    """Consecutive operations of a lane that belong together; times are in seconds."""

    lane: str
    kind: str
    bucket: int
    """-1 for work after the last layer: DDP copies the means, and thinwire checks that they are finite."""
    start: float
    end: float


class Timeline:
    """The boxes of one backward."""

    def __init__(self, boxes: list[Box]) -> None:
        self.boxes = boxes
        self._by_stage = {(box.kind, box.bucket): box for box in boxes if box.bucket >= 0}
        self.buckets = 1 + max(box.bucket for box in boxes)
        self.end = max(box.end for box in boxes)
        self.backward_end = self.stage("backward", self.buckets - 1).end
        self.sum_of_parts = sum(box.end - box.start for box in boxes)

    def stage(self, kind: str, bucket: int) -> Box:
        """Return the box of one of `STAGES`."""
        return self._by_stage[kind, bucket]


def traced(rank: int, world_size: int, program: Any) -> Timeline:
    """Train three steps, and return the timeline of the third backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to("shadow")
    with quiet(), pytest.MonkeyPatch.context() as patch:
        _label(patch)
        ddp = DDP(model, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
        wire = thinwire.attach(ddp, program)
        data = torch.ones(ROWS, WIDTH, device="shadow")
        for step in range(3):
            ddp.zero_grad()
            loss = ddp(data).square().mean()
            device.reset()
            if step == 2:
                device.start_trace(Speed())
            loss.backward()
        spans = device.end_trace()
        wire.finalize()
    return Timeline(boxes_of(spans))


def _label(patch: pytest.MonkeyPatch) -> None:
    """Label the operations of programs by stage and bucket."""
    for method in ("_resume", "_issue"):
        original = getattr(Scheduler, method)

        def labelled(self: Scheduler, task: Any, bucket: int, *rest: Any, original: Any = original) -> None:
            device.label(f"{task.stage} {bucket}")
            try:
                original(self, task, bucket, *rest)
            finally:
                device.label("")

        patch.setattr(Scheduler, method, labelled)


def boxes_of(spans: list[Span]) -> list[Box]:
    """Join the consecutive operations of each stream that belong to the same stage of the same bucket."""
    last_stage = max(int(span.label.split()[0]) for span in spans if span.label)
    last_bucket = max(int(span.label.split()[1]) for span in spans if span.label)
    found: list[Box] = []
    latest: dict[int, int] = {}
    layer = 0
    for span in spans:
        if span.label:
            stage, bucket = map(int, span.label.split())
            if span.what.startswith("all"):
                box = Box(NETWORK, f"exchange {stage + 1}", bucket, span.start, span.end)
            else:
                kind = {0: "encode", last_stage: "decode"}.get(stage, "combine")
                box = Box(SIDE, kind, bucket, span.start, span.end)
                # Programs start inside backward, as soon as their bucket is full.
                layer = max(layer, bucket + 1)
        elif layer <= last_bucket:
            box = Box(BACKWARD, "backward", layer, span.start, span.end)
        else:
            box = Box(BACKWARD, "finish", -1, span.start, span.end)
        place = latest.get(span.stream)
        if place is not None and found[place][:3] == box[:3] and box.start - found[place].end < GAP:
            found[place] = found[place]._replace(end=box.end)
        else:
            latest[span.stream] = len(found)
            found.append(box)
    return found


def table(timeline: Timeline) -> str:
    """Return the times of each bucket's stages in milliseconds, as a table in Markdown."""
    lines = [f"| bucket | {' | '.join(STAGES)} |", "|---" * (1 + len(STAGES)) + "|"]
    for bucket in range(timeline.buckets):
        found = [timeline.stage(kind, bucket) for kind in STAGES]
        times = " | ".join(f"{1e3 * box.start:.2f} - {1e3 * box.end:.2f}" for box in found)
        lines.append(f"| {bucket} | {times} |")
    return "\n".join(lines)


STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 } .small { font-size: 10px } .axis { text-anchor: middle }
  text.in { font-size: 9px; fill: #fff; text-anchor: middle }
  line { stroke: #d0d7de } .end { stroke: #cf222e; stroke-dasharray: 4 3 }
  .b0 { fill: #0969da } .b1 { fill: #bc4c00 } .b2 { fill: #1a7f37 }
  .b3 { fill: #8250df } .b4 { fill: #bf3989 } .b5 { fill: #8a6100 } .finish { fill: #6e7781 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } line { stroke: #3d444d } .end { stroke: #ff7b72 }
  }
"""
LEFT, TOP, LANE, WIDE = 124, 84, 44, 860
LETTERS = {"encode": "E", "combine": "C", "decode": "D", "exchange 1": "1", "exchange 2": "2", "finish": ""}


def draw(timeline: Timeline) -> str:
    """Draw the timeline as SVG, a lane for each of `LANES` and a colour for each bucket."""
    scale = (WIDE - LEFT - 20) / timeline.end
    bottom = TOP + LANE * len(LANES)
    parts = []
    for tick in range(1 + int(1e3 * timeline.end)):
        x = LEFT + tick * 1e-3 * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        unit = " ms" if tick == 0 else ""
        parts.append(f'<text class="small axis" x="{x:.1f}" y="{bottom + 14}">{tick}{unit}</text>')
    for row, lane in enumerate(LANES):
        parts.append(f'<text x="10" y="{TOP + LANE * row + 21}">{lane}</text>')
    for box in timeline.boxes:
        x, width = LEFT + box.start * scale, max(1.5, (box.end - box.start) * scale - 0.5)
        y = TOP + LANE * LANES.index(box.lane) + 3
        colour = "finish" if box.bucket < 0 else f"b{box.bucket % 6}"
        of = "" if box.bucket < 0 else f" of bucket {box.bucket}"
        letter = LETTERS.get(box.kind, f"layer {LAYERS - 1 - box.bucket}")
        parts.append(
            f'<rect class="{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="28" rx="2">'
            f"<title>{box.kind}{of}: {1e3 * box.start:.2f} to {1e3 * box.end:.2f} ms</title></rect>"
        )
        if letter and width > 5:
            parts.append(f'<text class="in" x="{x + width / 2:.1f}" y="{y + 17}">{letter}</text>')
    x = LEFT + timeline.backward_end * scale
    parts.append(f'<line class="end" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 12}" y2="{bottom}"/>')
    parts.append(f'<text class="small axis" x="{x:.1f}" y="{TOP - 16}">last gradient</text>')
    title = (
        f"One backward with Int8 on a modelled accelerator: {1e3 * timeline.end:.1f} ms;"
        f" its parts one after another: {1e3 * timeline.sum_of_parts:.1f} ms"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {bottom + 24}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f'<text class="title" x="10" y="18">{title}</text>{_legend(timeline)}{"".join(parts)}</svg>\n'
    )


def _legend(timeline: Timeline) -> str:
    entries = [(f"b{bucket % 6}", f"bucket {bucket}") for bucket in range(timeline.buckets)]
    entries.append(("finish", "means copied and checked"))
    found = [
        f'<rect class="{colour}" x="{10 + 66 * place}" y="28" width="10" height="10" rx="2"/>'
        f'<text class="small" x="{24 + 66 * place}" y="37">{words}</text>'
        for place, (colour, words) in enumerate(entries)
    ]
    letters = "E encode, C combine, D decode; 1 first exchange (all-to-all), 2 second exchange (all-gather)"
    return "".join(found) + f'<text class="small" x="10" y="54">{letters}</text>'


def main() -> None:
    """Run two ranks, draw the backward of rank 0, and print its table."""
    timeline = run_ranks(traced, 2, thinwire.Int8(), backend=SHADOW)[0]
    PATH.write_text(draw(timeline))
    print(table(timeline))  # noqa: T201
    print(  # noqa: T201
        f"\nlast gradient {1e3 * timeline.backward_end:.2f} ms, end {1e3 * timeline.end:.2f} ms,"
        f" sum of the parts {1e3 * timeline.sum_of_parts:.2f} ms; wrote {PATH}"
    )
    end_warm_ranks()


if __name__ == "__main__":
    main()
