"""The board and the alert rules that we ship name metrics, labels and label values that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import serving
from serving.metrics import REFUSALS, series_of
from serving.request import FinishReason

BOARDS = Path(serving.__file__).parent / "boards"
SERIES = {series.name: series for series in series_of(4096)}
SAMPLES = {
    sample: series
    for name, series in SERIES.items()
    for sample in ([f"{name}_{part}" for part in ("bucket", "sum", "count")] if series.kind == "histogram" else [name])
}
LABELS = {"model_name", "engine", "instance", "job", "le"}
LABEL_VALUES = {
    "finished_reason": set(map(str, FinishReason)),
    "reason": {*REFUSALS, "pages", "priority"},
    "ttft": {"met", "missed"},
    "tpot": {"met", "missed"},
    "target": {"ttft", "tpot"},
    "resource": {"compute", "slots", "pages"},
}
WORDS = {
    "sum",
    "min",
    "max",
    "avg",
    "rate",
    "by",
    "and",
    "or",
    "ignoring",
    "group_left",
    "histogram_quantile",
    "offset",
}
WORDS |= {"increase", "min_over_time", "deriv", "label_values", "up"}


def board():
    return json.loads((BOARDS / "grafana.json").read_text(encoding="utf-8"))


def rules():
    groups = yaml.safe_load((BOARDS / "prometheus_alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions():
    panels = [panel for panel in board()["panels"] if panel["type"] != "row"]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    found += [(variable["name"], variable["definition"]) for variable in board()["templating"]["list"][1:]]
    return found + [(rule["alert"], rule["expr"]) for rule in rules()]


def problems(expression):
    """What in a PromQL expression names nothing that a scrape has."""
    found = []
    selectors = re.findall(r"([a-z_:]+)\{([^}]*)\}", expression)
    for name, matchers in selectors:
        labels = LABELS | set(SAMPLES[name].labels) if name in SAMPLES else LABELS
        for label, value in re.findall(r'(\w+)\s*=~?\s*"([^"]*)"', matchers):
            if label not in labels:
                found.append(f"label {label} of {name}")
            elif not value.startswith("$") and label in LABEL_VALUES and value not in LABEL_VALUES[label]:
                found.append(f"value {value} of {label}")
    names = re.findall(r"[a-zA-Z_:][\w:]*", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)|\d+[a-z]", " ", expression))
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    known_labels = LABELS | {label for series in SERIES.values() for label in series.labels}
    found += [f"label {label}" for label in grouped - known_labels]
    found += [f"metric {name}" for name in names if name not in SAMPLES and name not in WORDS | known_labels]
    if not any(name in SAMPLES or name == "up" for name in names):
        found.append("no metric")
    return found


@pytest.mark.parametrize(("title", "expression"), expressions(), ids=lambda value: value[:40])
def test_an_expression_names_what_a_scrape_has(title, expression):
    assert problems(expression) == [], title
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


@pytest.mark.parametrize(
    "expression",
    [
        "sum(rate(vllm:time_per_output_token_seconds_bucket[1m]))",
        "vllm:time_to_first_token_seconds > 1",  # a histogram has no sample of that name
        'rate(headrace_requests_refused_total{reason="tired"}[1m])',
        'headrace_mbu{stage="decode"}',
        "sum by (use, tenat) (headrace_step_tokens_total)",
        "1 > 0",
    ],
)
def test_the_check_finds_what_there_is_not(expression):
    assert problems(expression)


def test_panels_do_not_overlap_and_have_their_own_ids():
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_alerts_cover_what_an_operator_must_hear_of():
    names = {rule["alert"] for rule in rules()}
    assert len(names) == len(rules())
    assert {"HeadraceNotReady", "HeadraceStepStuck", "HeadraceQueueGrowing", "HeadraceKVFullWithPreemptions"} <= names
    assert {"HeadraceCompileWhileServing", "HeadraceErrors"} <= names
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "warn") and rule["annotations"]["summary"]
