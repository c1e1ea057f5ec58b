"""What the status page shows: one JSON object about an engine, and the two pages themselves as they are served."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from serving.metrics import LENGTH_LABELS, WINDOW_S, EngineMetrics, RecentCompletion
from serving.observer import PHASES

if TYPE_CHECKING:
    from serving.engine import Engine

PAGES = Path(__file__).parent / "api" / "pages"
MAX_CELLS = 240  # of the picture of the page pool
MAX_DEVICES = 256  # that are listed


def status_snapshot(engine: Engine, metrics: EngineMetrics) -> dict[str, Any]:
    """How the engine does, in plain JSON values: any thread may ask, and while it runs, parts may be a step apart.

    Times are in seconds, sizes in bytes; what is not known (no request yet, no measured ceilings) is None. Holds no
    prompt, no output and no name of a tenant.
    """
    values = metrics.values()
    completions, step_tokens = metrics.recent()

    def value(name: str, *labels: str) -> float:
        return values.get(name, {}).get(labels, 0.0)

    def by_label(name: str) -> dict[str, float]:
        return {labels[0]: found for labels, found in sorted(values.get(name, {}).items())}

    config, runner, scheduler = engine.config, engine.runner, engine.scheduler
    queried, hit = value("vllm:prefix_cache_queries_total"), value("vllm:prefix_cache_hits_total")
    held_steps = value("headrace_kv_held_token_steps_total")
    return {
        "state": _state(engine, metrics),
        "model": {
            "name": metrics.base_labels["model_name"],
            "engine": metrics.base_labels["engine"],
            "dtype": config.dtype,
            "kv_dtype": config.kv_format[0],
            "max_model_len": engine.max_model_len,
        },
        "queues": {
            "num_running": scheduler.num_running,
            "num_slots": config.max_num_seqs,
            "num_waiting": scheduler.num_waiting,
            "num_waiting_tokens": scheduler.num_waiting_tokens,
        },
        "kv": {
            "page_size": config.page_size,
            "pages": by_label("headrace_kv_pages"),
            "used_fraction": value("vllm:kv_cache_usage_perc"),
            "waste_fraction": value("headrace_kv_unused_token_steps_total") / held_steps if held_steps else None,
            "cells": [[held, cached] for held, cached in scheduler.page_allocator.occupancy(MAX_CELLS)],
        },
        "steps": {"window_s": WINDOW_S, "tokens": dict(step_tokens)},
        "latency": {
            "num_completions": len(completions),
            "ttft": {"target_s": metrics.config.ttft_slo_s, **_percentiles([c.ttft_s for c in completions])},
            "tpot": {"target_s": metrics.config.tpot_slo_s, **_percentiles([c.tpot_s for c in completions])},
            "by_length": [_by_length(label, completions) for label in LENGTH_LABELS],
        },
        "prefix_cache": {
            "enabled": config.enable_prefix_caching,
            "queried_tokens": queried,
            "hit_tokens": hit,
            "hit_fraction": hit / queried if queried else None,
        },
        "hardware": {
            "mbu": {phase: by_label("headrace_mbu").get(phase) for phase in PHASES},
            "mfu": {phase: by_label("headrace_mfu").get(phase) for phase in PHASES},
            "device_idle_fraction_min": value("headrace_device_idle_fraction_min"),
            "device_idle_fraction_max": value("headrace_device_idle_fraction_max"),
        },
        "mesh": _mesh(engine),
        "totals": {
            "uptime_s": engine.now() - metrics.start_s,
            "requests": value("headrace_requests_total"),
            "refused": by_label("headrace_requests_refused_total"),
            "finished": by_label("vllm:request_success_total"),
            "prompt_tokens": value("vllm:prompt_tokens_total"),
            "generation_tokens": value("vllm:generation_tokens_total"),
            "preemptions": value("vllm:num_preemptions_total"),
            "compiles": value("headrace_compiles_total"),
            "programs": len(runner.reports),
        },
    }


def _state(engine: Engine, metrics: EngineMetrics) -> Literal["ready", "stuck", "dead", "not ready"]:
    if not engine.is_alive:
        return "dead"
    if metrics.is_stuck():
        return "stuck"
    return "ready" if metrics.is_ready() else "not ready"


def _percentiles(times_s: list[float | None]) -> dict[str, float | None]:
    known = [time_s for time_s in times_s if time_s is not None]
    if not known:
        return {"p50_s": None, "p90_s": None, "p99_s": None}
    p50, p90, p99 = np.percentile(known, (50, 90, 99))
    return {"p50_s": float(p50), "p90_s": float(p90), "p99_s": float(p99)}


def _by_length(label: str, completions: list[RecentCompletion]) -> dict[str, Any]:
    of_length = [completion for completion in completions if completion.length_label == label]
    return {
        "input_tokens": label,
        "num_completions": len(of_length),
        "ttft": _percentiles([completion.ttft_s for completion in of_length]),
        "tpot": _percentiles([completion.tpot_s for completion in of_length]),
    }


def _mesh(engine: Engine) -> dict[str, Any]:
    mesh, ledger = engine.runner.mesh, engine.runner.ledger
    devices: list[dict[str, Any]] = []
    for place, device in np.ndenumerate(mesh.devices):
        if len(devices) < MAX_DEVICES:
            devices.append({"id": int(device.id), "process": int(device.process_index), "place": list(place)})
    return {
        "axes": [{"name": str(name), "size": int(size)} for name, size in mesh.shape.items()],
        "device_kind": str(mesh.devices.flat[0].device_kind),
        "num_devices": int(mesh.devices.size),
        "devices": devices,
        "memory_bytes": {
            "weights": ledger.weights,
            "slot_table": ledger.slot_table,
            "workspace": ledger.workspace,
            "kv_pool": ledger.kv_pool,
            "slack": ledger.slack,
        },
    }


@dataclass(frozen=True)
class Page:
    """A page of HTML and the header Content-Security-Policy to send with it."""

    body: bytes
    content_security_policy: str


def load_page(name: Literal["status", "chat"]) -> Page:
    """One of our pages. Its policy lets its own script and style run, talk to its own server, and nothing else."""
    body = (PAGES / f"{name}.html").read_bytes()

    def source(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(body, policy)
