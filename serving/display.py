"""What people look at: start-up progress in a terminal, tables in a notebook."""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from serving.request import RequestOutput


class ProgressReporter:
    """Start-up progress on standard error, a line an item."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._last_s = 0.0

    def __call__(self, stage: str, done: int, total: int, item: str) -> None:
        now_s = time.monotonic()
        if not self.enabled or (stage == "load" and done < total and now_s - self._last_s < 0.5):
            return
        self._last_s = now_s
        if stage == "load":
            self.note(f"load {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        else:
            self.note(f"{stage} {done}/{total} {item}")

    def note(self, text: str) -> None:
        if self.enabled:
            print(text, file=sys.stderr, flush=True)


def _token_spans(output: Any) -> str:
    """The text, or its tokens shaded by probability where log-probs were asked for."""
    if not output.logprobs:
        return f"<span>{html.escape(output.text)}</span>"
    spans = []
    for entry in output.logprobs:
        probability = math.exp(entry.logprob)
        shade = f"hsl({120 * probability:.0f} 70% 85%)"
        spans.append(f'<span style="background:{shade}" title="p = {probability:.3f}">{entry.token_id}</span>')
    return f"<div>{html.escape(output.text)}</div><div>{' '.join(spans)}</div>"


def output_html(outputs: Sequence[RequestOutput]) -> str:
    """A table with a row for each completion."""
    rows = []
    for request in outputs:
        prompt = request.prompt if request.prompt is not None else f"{len(request.prompt_token_ids)} token ids"
        for output in request.outputs:
            rows.append(
                f"<tr><td>{html.escape(request.request_id)}</td><td>{html.escape(prompt[:200])}</td>"
                f"<td style='text-align:left'>{_token_spans(output)}</td><td>{len(output.token_ids)}</td>"
                f"<td>{html.escape(str(output.finish_reason))}</td></tr>"
            )
    head = "<tr><th>request</th><th>prompt</th><th>completion</th><th>tokens</th><th>finish</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def stats_html(stats: Mapping[str, Any]) -> str:
    """A table of names and values."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{html.escape(f'{value}')}</td></tr>"
        for name, value in stats.items()
    )
    return f"<table>{rows}</table>"
