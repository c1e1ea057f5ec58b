"""What metrics cost the step loop: microseconds a decode step to record it, and to work the records in.

    python benchmarks/metrics_cost.py

Steps are made up, so that no device is in the figure. Working in happens once in BATCH steps, there or in a scrape.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from serving import LLM, SamplingParams
from serving.metrics import BATCH, EngineMetrics
from serving.observer import step_record
from serving.request import Request
from serving.scheduling.schedule import Schedule
from serving.scheduling.scheduler import StepEvent

TINY = Path(__file__).parents[1] / "tests" / "data" / "tiny"
ROUNDS = 20


def main() -> None:
    llm = LLM(f"dummy:{TINY}", dtype="float32", max_model_len=64, max_num_seqs=2, num_pages=16, show_progress=False)
    metrics = EngineMetrics(llm.engine, model_name="tiny")
    for num_rows in (1, 8, 32, 128, 256):
        requests = [
            Request(
                request_id=str(i),
                prompt_token_ids=(1,) * 500,
                params=SamplingParams(),
                max_total_tokens=1000,
                output_token_ids=[1, 2],
                first_token_time_s=0.5,
                last_token_time_s=1.0,
            )
            for i in range(num_rows)
        ]
        schedule = Schedule(step_id=1, decode=tuple(enumerate(requests)), num_decode_slots=num_rows)
        events = [
            StepEvent(request=request, slot=slot, new_token_ids=(2,), finished=False)
            for slot, request in enumerate(requests)
        ]
        record_us, work_in_us = [], []
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            for _ in range(BATCH - 1):  # one more would work them in
                metrics.step_read(step_record(schedule, events, read_time_s=2.0, started_time_s=1.9))
            recorded_s = time.perf_counter()
            metrics.values()
            record_us.append((recorded_s - started_s) / (BATCH - 1) * 1e6)
            work_in_us.append((time.perf_counter() - recorded_s) / (BATCH - 1) * 1e6)
        print(
            json.dumps(
                {
                    "rows": num_rows,
                    "record_us": round(statistics.median(record_us), 1),
                    "work_in_us": round(statistics.median(work_in_us), 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
