"""Programs overlap with backward and with the network, at the modelled times of an accelerator."""

from functools import cache
from xml.etree import ElementTree

import thinwire
from tests.harness import run_ranks
from tests.shadow.device import SHADOW
from tests.shadow.timeline import LAYERS, Box, Timeline, draw, traced


@cache
def timelines() -> list[Timeline]:
    return run_ranks(traced, 2, thinwire.Int8(), backend=SHADOW)


def overlap(one: Box, other: Box) -> bool:
    return one.start < other.end and other.start < one.end


def test_each_layer_is_a_bucket() -> None:
    assert [timeline.buckets for timeline in timelines()] == [LAYERS] * 2


def test_encoding_starts_while_backward_computes_the_next_layer() -> None:
    for timeline in timelines():
        for bucket in range(LAYERS - 1):
            encode = timeline.stage("encode", bucket)
            assert encode.start < timeline.backward_end
            assert overlap(encode, timeline.stage("backward", bucket + 1))


def test_exchanges_overlap_with_later_buckets() -> None:
    for timeline in timelines():
        for bucket in range(1, LAYERS):
            exchange = timeline.stage("exchange 1", bucket - 1)
            later = [timeline.stage(kind, bucket) for kind in ("backward", "encode")]
            assert any(overlap(exchange, box) for box in later), bucket


def test_a_step_is_shorter_than_the_sum_of_its_parts() -> None:
    for timeline in timelines():
        assert timeline.backward_end < timeline.end < 0.7 * timeline.sum_of_parts


def test_the_drawing_has_every_box() -> None:
    timeline = timelines()[0]
    drawing = ElementTree.fromstring(draw(timeline))
    boxes = [rect for rect in drawing.iter("{http://www.w3.org/2000/svg}rect") if len(rect)]
    assert len(boxes) == len(timeline.boxes)
