"""A trace for Perfetto (ui.perfetto.dev) or chrome://tracing: timelines side by side.

One process group per timeline, one thread per rank, one slice per action, one arrow per message.
The format is Chrome's JSON trace event format; its times are microseconds.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pptune.views.plans import shown_label
from pptune.views.slices import Slice, Timeline, flows

CATEGORIES = {
    "F": "forward", "B": "backward", "I": "backward input", "W": "backward weight",
}  # fmt: skip


def trace_json(timelines: Sequence[Timeline]) -> bytes:
    """The whole trace as JSON text."""
    events: list[dict[str, Any]] = []
    for number, timeline in enumerate(timelines, start=1):
        events += _names(timeline, process=number)
        events += (_slice_event(item, timeline, process=number) for item in timeline.slices)
        events += _flow_events(timeline, process=number)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(timeline: Timeline, *, process: int) -> Iterator[dict[str, Any]]:
    def name(kind: str, thread: int, **args: object) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}

    yield name("process_name", 0, name=f"{timeline.name}: {shown_label(timeline.plan.label)}")
    yield name("process_sort_index", 0, sort_index=process)
    for rank in range(timeline.plan.num_ranks):
        yield name("thread_name", rank, name=f"rank {rank}")
        yield name("thread_sort_index", rank, sort_index=rank)


def _slice_event(item: Slice, timeline: Timeline, *, process: int) -> dict[str, Any]:
    start_ns = _nanoseconds(item.start_s)
    return {
        "ph": "X",
        "name": item.name,
        "cat": CATEGORIES[item.work],
        "pid": process,
        "tid": item.rank,
        "ts": start_ns / 1000,
        "dur": (_nanoseconds(item.end_s) - start_ns) / 1000,
        "args": {
            "stage": item.stage,
            "chunk": timeline.plan.stages_of(item.rank).index(item.stage),
            "microbatch": item.microbatch,
        },
    }


def _flow_events(timeline: Timeline, *, process: int) -> Iterator[dict[str, Any]]:
    """Two events per message. An arrow belongs to the slice that encloses its time."""
    for number, flow in enumerate(flows(timeline)):
        name = "activation" if flow.consumer.work == "F" else "gradient"
        common = {"name": name, "cat": "message", "id": f"{process}.{number}", "pid": process}
        start_ns = _nanoseconds(flow.producer.start_s)
        # At its very end a slice no longer encloses anything, so the arrow leaves just before.
        leaves_ns = max(start_ns, _nanoseconds(flow.producer.end_s) - 1)
        arrives_ns = max(leaves_ns, _nanoseconds(flow.consumer.start_s))
        yield {**common, "ph": "s", "tid": flow.producer.rank, "ts": leaves_ns / 1000}
        yield {**common, "ph": "f", "bp": "e", "tid": flow.consumer.rank, "ts": arrives_ns / 1000}


def _nanoseconds(seconds: float) -> int:
    """Whole nanoseconds: all ends are rounded alike, which keeps neighbours from overlapping."""
    return round(seconds * 1e9)
