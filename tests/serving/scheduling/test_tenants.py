"""KV budgets and rate limits as plain bookkeeping."""

from __future__ import annotations

import pytest

from configs.scheduling import SchedulingConfig
from serving.scheduling.tenants import KvBudgets, RateLimits

LIMITED = SchedulingConfig(
    tenant_names=("busy", "free"),
    tenant_requests_per_min=(6, 0),
    tenant_tokens_per_min=(600, 0),
    default_tenant_requests_per_min=60,
)


def test_a_tenant_borrows_what_it_holds_beyond_its_budget():
    budgets = KvBudgets(SchedulingConfig(tenant_names=("a",), tenant_kv_tokens=(100,)))
    assert budgets.is_used and not KvBudgets(SchedulingConfig()).is_used
    budgets.hold("a", 90)
    budgets.hold("b", 1000)
    assert (budgets.excess("a"), budgets.excess("a", 30), budgets.excess("b")) == (0, 20, 0)
    budgets.hold("a", -90)
    budgets.hold("b", -1000)
    assert not budgets.held


def test_requests_over_the_limit_are_told_when_to_come_back_and_let_in_then():
    limits = RateLimits(LIMITED)
    taken = [limits.try_take("busy", num_tokens=1, now_s=0.0) for _ in range(7)]
    assert taken == [0] * 6 + [10]
    assert limits.try_take("busy", num_tokens=1, now_s=9.0) == 1
    assert limits.try_take("busy", num_tokens=1, now_s=10.0) == 0
    assert limits.limits("busy") == "6 requests and 600 tokens a minute"


def test_tokens_count_prompt_and_output_and_a_refused_request_costs_nothing():
    limits = RateLimits(LIMITED)
    assert limits.try_take("busy", num_tokens=400, now_s=0.0) == 0
    assert limits.try_take("busy", num_tokens=300, now_s=0.0) == 10
    assert limits.try_take("busy", num_tokens=200, now_s=0.0) == 0
    limits.take_output("busy", 50, 0.0)
    assert limits.try_take("busy", num_tokens=10, now_s=0.0) == 6


def test_a_request_larger_than_a_minute_gets_in_when_the_bucket_is_full_and_is_paid_off_after():
    limits = RateLimits(LIMITED)
    assert limits.try_take("busy", num_tokens=1200, now_s=0.0) == 0
    assert limits.try_take("busy", num_tokens=600, now_s=60.0) == 60
    assert limits.try_take("busy", num_tokens=600, now_s=120.0) == 0


def test_tenants_without_limits_and_those_not_named_go_by_their_own():
    limits = RateLimits(LIMITED)
    assert all(limits.try_take("free", num_tokens=10**6, now_s=0.0) == 0 for _ in range(100))
    assert [limits.try_take("other", num_tokens=10**6, now_s=0.0) for _ in range(61)] == [0] * 60 + [1]
    assert limits.try_take("third", num_tokens=1, now_s=0.0) == 0


def test_names_that_clients_make_up_are_forgotten_once_their_buckets_are_full():
    limits = RateLimits(LIMITED)
    for number in range(5000):
        assert limits.try_take(f"made up {number}", num_tokens=1, now_s=float(number)) == 0
    assert len(limits._buckets) < 300


@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_settings_of_named_tenants_win_over_the_defaults(weight):
    config = SchedulingConfig(
        tenant_names=("a",), tenant_weights=(weight,), default_tenant_weight=7.0, default_tenant_kv_tokens=50
    )
    assert (config.weight("a"), config.weight("b")) == (weight, 7.0)
    assert (config.kv_tokens("a"), config.kv_tokens("b")) == (None, 50)
