"""What a profile says of a device: how long it was busy, in which kernels, and the gaps between them.

A profile has a plane for each device and in it a line for each stream, where kernels do not overlap, and may have
derived lines (`XLA Ops`, `XLA Modules`, `Steps`) that show the same time again: of a plane, only one kind of line is
read. A CPU has no device plane; there the operations that XLA's executor threads ran stand in.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.bench.figures import significant

GAP_NS = 10_000  # gaps of more than this are counted
NUM_TOP_KERNELS = 20
MAX_NAME_CHARS = 96

DEVICE_PLANE = re.compile(r"/device:(GPU|TPU):\d+")
HOST_PLANE = "/host:CPU"
STREAM_LINE = "Stream #"
OPS_LINE = "XLA Ops"
HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")  # run on copy engines beside the kernels: the device is not busy with them

COMMAND_BUFFER_STATS = ("cuda_graph_id", "cuda_graph_exec_id")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that ran on a line of a device's plane, by the profile's clock."""

    line: str
    name: str
    start_ns: float
    end_ns: float
    grid: str = ""  # of a GPU kernel: the same name at another grid is other work
    is_in_command_buffer: bool = False


@dataclass(frozen=True)
class DevicePlane:
    name: str
    events: Sequence[TraceEvent]


def read_planes(folder: Path) -> list[DevicePlane]:
    """The devices of the newest profile under `folder`."""
    from jax.profiler import ProfileData

    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    assert files, f"the profiler wrote nothing under {folder}"
    return device_planes(ProfileData.from_file(str(files[-1])))


def device_planes(profile: Any) -> list[DevicePlane]:
    """The device planes of a jax.profiler.ProfileData that have events, or else the one that stands in on CPU."""
    # jaxlib's iterators warn when their types are first made; a filter that turns warnings into errors would end the
    # process there, inside C++.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return _device_planes(profile)


def _device_planes(profile: Any) -> list[DevicePlane]:
    planes = []
    host_events: list[TraceEvent] = []
    for plane in profile.planes:
        if DEVICE_PLANE.fullmatch(plane.name):
            lines = list(plane.lines)
            streams = [line for line in lines if line.name.startswith(STREAM_LINE)]
            chosen = streams or [line for line in lines if line.name == OPS_LINE]
            events = _events(chosen)
            if events:
                planes.append(DevicePlane(plane.name, events))
        elif plane.name == HOST_PLANE:
            host_events = _events(plane.lines, only_operations=True)
    if not planes and host_events:
        planes.append(DevicePlane(f"{HOST_PLANE} (no device plane: operations of XLA's executor threads)", host_events))
    return planes


def _events(lines: Iterable[Any], *, only_operations: bool = False) -> list[TraceEvent]:
    """The events of profile lines; `only_operations`: those of XLA's operations, among whatever else a thread did."""
    events = []
    for number, line in enumerate(lines):
        for event in line.events:
            stats = dict(event.stats)
            if only_operations and "hlo_op" not in stats:
                continue
            grid = re.search(r"grid:([\d,]+)", str(stats.get("kernel_details", "")))
            events.append(
                TraceEvent(
                    f"{number} {line.name}",  # threads may share a name
                    event.name,
                    event.start_ns,
                    event.start_ns + event.duration_ns,
                    grid[1].strip(",") if grid else "",
                    any(stats.get(key) for key in COMMAND_BUFFER_STATS),
                )
            )
    return events


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of (start, end) intervals, as disjoint intervals in order; those that touch become one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def own_times(events: Sequence[TraceEvent]) -> list[tuple[TraceEvent, float]]:
    """Each event with its time in ns less that of the events inside it on its line, such as the body of a loop."""
    own: list[tuple[TraceEvent, float]] = []
    by_line: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        by_line[event.line].append(event)
    for line_events in by_line.values():
        open_places: list[int] = []  # in `own`: the events around the next one
        for event in sorted(line_events, key=lambda e: (e.start_ns, -e.end_ns)):
            while open_places and own[open_places[-1]][0].end_ns <= event.start_ns:
                open_places.pop()
            duration_ns = event.end_ns - event.start_ns
            if open_places:
                parent, parent_ns = own[open_places[-1]]
                own[open_places[-1]] = parent, parent_ns - (min(event.end_ns, parent.end_ns) - event.start_ns)
            open_places.append(len(own))
            own.append((event, duration_ns))
    return own


def short_name(name: str) -> str:
    """A kernel's name without return type, parameter list and XLA's numbering, cut to a readable length."""
    name = name.removeprefix("void ")
    if name.endswith(")"):
        depth = 0
        for place in range(len(name) - 1, -1, -1):
            depth += (name[place] == ")") - (name[place] == "(")
            if depth == 0:
                name = name[:place] or name
                break
    name = re.sub(r"([._]\d+)+$", "", name) or name
    return name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 3] + "..."


def summarize(planes: Sequence[DevicePlane], num_steps: int) -> dict[str, Any]:
    """Figures of a profile of `num_steps` steps; times are of one device, the mean where there are several.

    wall_ms: from the first kernel's start to the last one's end. busy_ms: the union of all kernels' time over the
    streams, copies on the device included, copies to and from the host not. device_idle_fraction: 1 - busy / wall.
    """
    kernels = {plane.name: [e for e in plane.events if e.name not in HOST_COPIES] for plane in planes}
    planes = [plane for plane in planes if kernels[plane.name]]
    if not planes or num_steps < 1:
        return {"plane": None, "steps": num_steps, "note": "the profile shows no kernel of a device"}
    kernels = {plane.name: kernels[plane.name] for plane in planes}
    busy = {name: merge_intervals((e.start_ns, e.end_ns) for e in events) for name, events in kernels.items()}
    wall_ns = max(spans[-1][1] for spans in busy.values()) - min(spans[0][0] for spans in busy.values())
    busy_ns = sum(end - start for spans in busy.values() for start, end in spans) / len(planes)
    gaps_ns = [b[0] - a[1] for spans in busy.values() for a, b in itertools.pairwise(spans)]
    long_gaps_ns = [gap for gap in gaps_ns if gap > GAP_NS]
    all_kernels = [event for events in kernels.values() for event in events]
    copies = [event for plane in planes for event in plane.events if event.name in HOST_COPIES]
    per_step = num_steps * len(planes)
    return {
        "plane": planes[0].name,
        "devices": len(planes),
        "steps": num_steps,
        "wall_ms": round(wall_ns / 1e6, 3),
        "busy_ms": round(busy_ns / 1e6, 3),
        "device_idle_fraction": round(1 - busy_ns / max(wall_ns, 1e-9), 4),
        "wall_ms_per_step": round(wall_ns / 1e6 / num_steps, 4),
        "busy_ms_per_step": round(busy_ns / 1e6 / num_steps, 4),
        "gaps_over_10us": len(long_gaps_ns),
        "gaps_over_10us_ms": round(sum(long_gaps_ns) / 1e6 / len(planes), 3),
        "gaps_up_to_10us_ms": round((sum(gaps_ns) - sum(long_gaps_ns)) / 1e6 / len(planes), 3),
        "longest_gap_us": round(max(gaps_ns, default=0) / 1e3, 1),
        "kernels_per_step": round(len(all_kernels) / per_step, 1),
        "command_buffer_kernel_fraction": round(
            sum(event.is_in_command_buffer for event in all_kernels) / len(all_kernels), 4
        ),
        "host_copies_per_step": round(len(copies) / per_step, 2),
        "host_copies_us_per_step": round(sum(e.end_ns - e.start_ns for e in copies) / 1e3 / per_step, 2),
        **_top_kernels(kernels, per_step),
    }


def _top_kernels(kernels: dict[str, list[TraceEvent]], per_step: int) -> dict[str, Any]:
    calls: dict[tuple[str, str], int] = defaultdict(int)
    times_ns: dict[tuple[str, str], float] = defaultdict(float)
    for events in kernels.values():
        for event, own_ns in own_times(events):
            key = short_name(event.name), event.grid
            calls[key] += 1
            times_ns[key] += own_ns
    total_ns = max(sum(times_ns.values()), 1e-9)
    ranked = sorted(times_ns, key=lambda key: -times_ns[key])
    rows = [
        {
            "name": key[0],
            "grid": key[1],
            "calls_per_step": significant(calls[key] / per_step),
            "us_per_call": round(times_ns[key] / calls[key] / 1e3, 2),
            "us_per_step": round(times_ns[key] / 1e3 / per_step, 2),
            "share": round(times_ns[key] / total_ns, 4),
        }
        for key in ranked[:NUM_TOP_KERNELS]
    ]
    rest_ns = sum(times_ns[key] for key in ranked[NUM_TOP_KERNELS:])
    return {"kernels": rows, "other_kernels_share": round(rest_ns / total_ns, 4)}
