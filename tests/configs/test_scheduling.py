"""SchedulingConfig: parallel tuples, classes of priorities, and what is refused by name."""

from __future__ import annotations

import pytest

from configs.checks import ConfigError
from configs.scheduling import SchedulingConfig


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"class_names": ()}, "class_names"),
        ({"class_names": ("A",)}, "class_names"),
        ({"class_names": ("a", "a"), "class_priorities": (0, 1)}, "class_names"),
        ({"class_names": ("a", "b")}, "class_priorities"),
        ({"class_names": ("a", "b"), "class_priorities": (5, 0)}, "class_priorities"),
        ({"class_priorities": (2**31,)}, "class_priorities"),
        ({"class_priorities": (True,)}, "class_priorities"),
        ({"class_ttft_s": (-1.0,)}, "class_ttft_s"),
        ({"class_ttft_s": (float("nan"),)}, "class_ttft_s"),
        ({"class_tpot_s": (1.0, 2.0)}, "class_tpot_s"),
        ({"class_ageing_s": -1}, "class_ageing_s"),
        ({"tenant_names": ("a", "a")}, "tenant_names"),
        ({"tenant_names": ("é",)}, "tenant_names"),
        ({"tenant_weights": (1.0,)}, "tenant_weights"),
        ({"tenant_names": ("a",), "tenant_weights": (0.0,)}, "tenant_weights"),
        ({"tenant_names": ("a",), "tenant_kv_tokens": (-1,)}, "tenant_kv_tokens"),
        ({"tenant_names": ("a",), "tenant_tokens_per_min": (1, 2)}, "tenant_tokens_per_min"),
        ({"default_tenant_weight": 0.0}, "default_tenant_weight"),
        ({"max_step_s": -0.01}, "max_step_s"),
        ({"max_step_s": 0.01, "slo_control": False}, "max_step_s"),
        ({"background_step_s": 0.01}, "background_step_s"),
        ({"background_step_s": 0.01, "class_ttft_s": (1.0,)}, "background_step_s"),
        ({"default_tenant_requests_per_min": -1}, "default_tenant_requests_per_min"),
        ({"max_long_prefills": 0}, "max_long_prefills"),
        ({"max_preemptions": -1}, "max_preemptions"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, name):
    with pytest.raises(ConfigError, match=rf"SchedulingConfig\.{name}\b"):
        SchedulingConfig(**fields)


def test_a_priority_is_of_the_last_class_that_begins_at_or_below_it():
    config = SchedulingConfig(class_names=("a", "b", "c"), class_priorities=(0, 10, 20))
    assert [config.class_of(priority) for priority in (-5, 0, 9, 10, 19, 20, 2**31 - 1)] == [0, 0, 0, 1, 1, 2, 2]
    assert config.class_ttft_s == (0.0, 0.0, 0.0)


def test_a_bound_on_steps_alone_has_them_controlled():
    assert not SchedulingConfig().controls_steps
    assert SchedulingConfig(max_step_s=0.02).controls_steps
