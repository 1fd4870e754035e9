"""A custom program in ten lines, and a timeline of how the engine runs it.

    .venv/bin/python examples/timeline.py docs/timeline.svg

The timeline shows one step on two ranks. Each row is a bucket, each bar a collective in flight.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from benchmarks.ranks import run
from benchmarks.workloads import WORKLOADS


@dataclass(frozen=True)
class TwoShotMean:
    """A program for the exact mean. Every rank averages one slice of the bucket, then all share them."""

    def __call__(
        self, bucket: thinwire.Bucket, memory: thinwire.Memory
    ) -> thinwire.Collectives[thinwire.Outcome]:
        """Average a bucket with two collectives."""
        world_size, length = bucket.world_size, bucket.buffer.numel()
        padded = torch.nn.functional.pad(bucket.buffer, (0, -length % world_size))
        own = yield thinwire.ReduceScatter(padded.view(world_size, -1))
        slices = yield thinwire.AllGather(own.mul_(1 / world_size))
        return thinwire.Outcome(mean=slices.flatten()[:length])


def one_step(rank: int, world_size: int) -> list[thinwire.StepRecord]:
    """Train ten steps, and return every rank's record of the last one."""
    work = WORKLOADS["gpt"]
    ddp = DDP(work.model(), bucket_cap_mb=4)
    wire = thinwire.attach(ddp, TwoShotMean())
    for step in range(10):
        dist.barrier()
        ddp.zero_grad()
        ddp(work.batch(rank, step)).backward()
    records: list[thinwire.StepRecord] = [None] * world_size  # type: ignore[list-item]
    dist.all_gather_object(records, wire.stats().last)
    return records


STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 } .small { font-size: 10px } .small.order { fill: #fff }
  .stage0 { fill: #0969da } .stage1 { fill: #bc4c00 } line { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } line { stroke: #3d444d } }
"""
LEFT, TOP, ROW, WIDTH = 76, 76, 22, 760


def draw(records: list[thinwire.StepRecord]) -> str:
    """Draw the timeline as SVG."""
    buckets = 1 + max(op.bucket for op in records[0].ops)
    panel = ROW * buckets + 44
    spans = [max(op.ended or op.issued for op in r.ops) - r.ops[0].issued for r in records]
    scale = (WIDTH - LEFT - 20) / max(spans)
    parts = []
    for rank, record in enumerate(records):
        top, start = TOP + rank * panel, record.ops[0].issued
        parts.append(f'<text class="title" x="10" y="{top - 8}">rank {rank}</text>')
        for bucket in range(buckets):
            y = top + ROW * bucket
            parts.append(f'<text class="small" x="10" y="{y + 14}">bucket {bucket}</text>')
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y + ROW - 1}" y2="{y + ROW - 1}"/>')
        for place, op in enumerate(record.ops):
            x, y = LEFT + (op.issued - start) * scale, top + ROW * op.bucket + 3
            width = max(16.0, ((op.ended or op.issued) - op.issued) * scale)
            parts.append(
                f'<rect class="stage{op.stage}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="14" rx="3"/>'
                f'<text class="small order" x="{x + 3:.1f}" y="{y + 11}">{place + 1}</text>'
            )
    height = TOP + len(records) * panel
    same = "the same" if len({record.order for record in records}) == 1 else "NOT THE SAME"
    title = (
        f"One step, two ranks: numbers are the order of issue, {same} on both."
        f" {max(spans) * 1e3:.0f} ms from first to last."
    )
    legend = (
        '<rect class="stage0" x="10" y="30" width="12" height="12" rx="3"/>'
        '<text class="small" x="27" y="40">first collective of a bucket</text>'
        '<rect class="stage1" x="180" y="30" width="12" height="12" rx="3"/>'
        '<text class="small" x="197" y="40">second, issued while later buckets are in flight</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f'<text class="title" x="10" y="18">{title}</text>{legend}{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Run two ranks, and write their timeline."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "timeline.svg")
    path.write_text(draw(run(one_step, 2)))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
