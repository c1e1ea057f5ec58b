"""Reading a device's profile: unions, own times and kernel tables on events made by hand."""

from __future__ import annotations

import itertools
import time

import numpy as np
from jax.profiler import ProfileData

from serving.bench.device_trace import (
    DevicePlane,
    TraceEvent,
    device_planes,
    merge_intervals,
    own_times,
    short_name,
    summarize,
)


def test_union_of_random_intervals_covers_what_any_of_them_covers():
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(100):
        starts = rng.integers(0, 60, rng.integers(0, 20))
        intervals = [
            (int(start), int(start + length))
            for start, length in zip(starts, rng.integers(1, 9, len(starts)), strict=True)
        ]
        merged = merge_intervals(intervals)
        covered = {point for start, end in intervals for point in range(start, end)}
        assert {point for start, end in merged for point in range(start, end)} == covered
        assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def event(start_us: float, end_us: float, name: str = "k", line: str = "0 Stream #1", grid: str = "") -> TraceEvent:
    return TraceEvent(line, name, start_us * 1e3, end_us * 1e3, grid)


def test_own_time_leaves_out_what_runs_inside():
    loop, first, second, inner = event(0, 100, "loop"), event(10, 30, "a"), event(40, 90, "b"), event(50, 60, "c")
    other_line = event(0, 100, "d", line="1 Stream #2")
    own = {e.name: ns / 1e3 for e, ns in own_times([inner, second, other_line, first, loop])}
    assert own == {"loop": 30.0, "a": 20.0, "b": 40.0, "c": 10.0, "d": 100.0}


def test_busy_time_is_the_union_over_streams_and_gaps_are_counted():
    events = [
        event(0, 40, "gemm_1", grid="8,1,1"),
        event(30, 60, "gemm_2", line="1 Stream #2", grid="8,1,1"),  # overlaps the first for 10 us
        event(65, 75, "gemm_3", grid="4,1,1"),  # 5 us after: a short gap
        event(75, 80, "MemcpyD2D"),
        event(100, 120, "gemm_4", grid="8,1,1"),  # 20 us after: a long one
        event(80, 99, "MemcpyD2H", line="2 Stream #3"),  # the copy engine: not busy
    ]
    figures = summarize([DevicePlane("/device:GPU:0", events)], num_steps=2)
    assert (figures["wall_ms"], figures["busy_ms"]) == (0.12, 0.095)
    assert figures["device_idle_fraction"] == round(25 / 120, 4)
    assert (figures["gaps_over_10us"], figures["gaps_over_10us_ms"], figures["gaps_up_to_10us_ms"]) == (1, 0.02, 0.005)
    assert figures["longest_gap_us"] == 20.0 and figures["kernels_per_step"] == 2.5
    assert figures["host_copies_per_step"] == 0.5 and figures["host_copies_us_per_step"] == 9.5
    rows = [(row["name"], row["grid"], row["calls_per_step"], row["us_per_call"]) for row in figures["kernels"]]
    assert rows == [("gemm", "8,1,1", 1.5, 30.0), ("gemm", "4,1,1", 0.5, 10.0), ("MemcpyD2D", "", 0.5, 5.0)]
    assert [row["share"] for row in figures["kernels"]] == [0.8571, 0.0952, 0.0476]  # of 105 us
    assert figures["other_kernels_share"] == 0.0


def test_several_devices_give_their_mean():
    planes = [DevicePlane(f"/device:GPU:{i}", [event(0, 50), event(end - 10, end)]) for i, end in enumerate((80, 100))]
    figures = summarize(planes, num_steps=1)
    assert figures["devices"] == 2 and figures["wall_ms"] == 0.1 and figures["busy_ms"] == 0.06
    assert figures["device_idle_fraction"] == 0.4 and figures["gaps_over_10us"] == 2


def test_profile_without_kernels_says_so():
    copies = DevicePlane("/device:GPU:0", [event(0, 5, "MemcpyH2D")])
    for planes in ([], [copies]):
        assert summarize(planes, num_steps=1)["plane"] is None


def test_rare_kernels_are_summed_up():
    events = [event(10 * i, 10 * i + 5, f"kernel_{chr(97 + i)}") for i in range(25)]
    figures = summarize([DevicePlane("/device:GPU:0", events)], num_steps=1)
    assert len(figures["kernels"]) == 20 and figures["other_kernels_share"] == 0.2


def test_kernel_names_are_readable():
    assert short_name("loop_add_fusion_17") == short_name("loop_add_fusion") == "loop_add_fusion"
    assert short_name("dot.3.2") == "dot" and short_name("_1") == "_1"
    assert short_name("nvjet_tst_128x64_64x6_2x1_v_bz_coopA_TNT") == "nvjet_tst_128x64_64x6_2x1_v_bz_coopA_TNT"
    assert (
        short_name("void cutlass::Kernel2<gemm_bf16<(int)4> >(T1::Params, f(x))")
        == "cutlass::Kernel2<gemm_bf16<(int)4> >"
    )
    assert len(short_name("k" * 500)) == 96


# An XSpace as CUPTI fills it on a GPU, with the derived lines that show the same time again. Times: ps from the
# line's timestamp.
GPU_PROFILE = """
planes {
  name: "/device:GPU:0"
  lines { id: 1 name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 20000000
      stats { metadata_id: 1 str_value: "regs:32 static_shared:0 dynamic_shared:0 grid:132,1,1 block:128,1,1 occ_pct:50" }
      stats { metadata_id: 2 uint64_value: 7 } }
    events { metadata_id: 2 offset_ps: 20000000 duration_ps: 10000000 }
  }
  lines { id: 2 name: "Stream #14(MemcpyD2H)" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 35000000 duration_ps: 2000000 }
  }
  lines { id: 3 name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 2 offset_ps: 0 duration_ps: 90000000 } }
  lines { id: 4 name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 4 offset_ps: 0 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_12" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2H" } }
  event_metadata { key: 4 value { id: 4 name: "jit_decode" } }
  stat_metadata { key: 1 value { id: 1 name: "kernel_details" } }
  stat_metadata { key: 2 value { id: 2 name: "cuda_graph_id" } }
}
planes { name: "/device:GPU:1" }
planes { name: "/device:CUSTOM:PM sampling"
  lines { name: "Stream #1" events { metadata_id: 1 duration_ps: 9 } }
  event_metadata { key: 1 value { id: 1 name: "counter" } }
}
planes { name: "/host:CPU"
  lines { name: "python" events { metadata_id: 1 duration_ps: 900000000 stats { metadata_id: 1 str_value: "add.1" } } }
  event_metadata { key: 1 value { id: 1 name: "add.1" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
"""


def test_gpu_profile_is_read_from_its_streams_alone():
    (plane,) = device_planes(ProfileData.from_text_proto(GPU_PROFILE))
    assert plane.name == "/device:GPU:0"
    assert [(e.name, e.start_ns, e.end_ns, e.grid, e.is_in_command_buffer) for e in plane.events] == [
        ("gemm_fusion_dot_12", 1000.0, 21000.0, "132,1,1", True),
        ("loop_add_fusion", 21000.0, 31000.0, "", False),
        ("MemcpyD2H", 36000.0, 38000.0, "", False),
    ]
    figures = summarize([plane], num_steps=1)
    assert figures["wall_ms"] == figures["busy_ms"] == 0.03 and figures["device_idle_fraction"] == 0.0
    assert figures["command_buffer_kernel_fraction"] == 0.5
    assert [row["name"] for row in figures["kernels"]] == ["gemm_fusion_dot", "loop_add_fusion"]


def test_plane_without_streams_is_read_from_its_operations():
    text = GPU_PROFILE.replace("GPU:0", "TPU:0").replace("Stream #13(Compute)", "Steps").replace("Stream #14", "Copies")
    (plane,) = device_planes(ProfileData.from_text_proto(text))
    assert [(e.name, e.end_ns - e.start_ns) for e in plane.events] == [("loop_add_fusion", 90000.0)]


def test_without_a_device_the_operations_of_the_host_stand_in_and_the_plane_says_so():
    text = GPU_PROFILE.replace("/device:GPU:0", "/device:NPU:0")
    (plane,) = device_planes(ProfileData.from_text_proto(text))
    assert "no device plane" in plane.name and [e.name for e in plane.events] == ["add.1"]
