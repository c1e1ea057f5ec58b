"""Who is next: classes, ageing, fairness between tenants, order within one, deadlines. A model keeps every promise."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from configs.scheduling import SchedulingConfig
from serving.scheduling.waiting_queue import Entry, WaitingQueue

TWO_CLASSES = SchedulingConfig(class_names=("fast", "slow"), class_priorities=(0, 10), class_ageing_s=5.0)


class Driver:
    """A queue of numbered requests of one token each."""

    def __init__(self, config: SchedulingConfig = TWO_CLASSES):
        self.queue: WaitingQueue[int] = WaitingQueue(config)
        self.num_added = 0

    def add(
        self,
        *,
        tenant: str = "a",
        priority: int = 0,
        num_tokens: int = 1,
        now_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> Entry[int]:
        number = self.num_added
        self.num_added += 1
        entry = self.queue.entry(number, tenant=tenant, priority=priority, order=(number, 0), deadline_s=deadline_s)
        self.queue.push(entry, num_tokens=num_tokens, now_s=now_s)
        return entry

    def take(self, num_tokens: int = 1, **head) -> int | None:
        entry = self.queue.head(**head)
        if entry is None:
            return None
        self.queue.placed(entry, num_tokens)
        return entry.item

    def take_all(self) -> list[int]:
        taken = []
        while (number := self.take()) is not None:
            taken.append(number)
        return taken


def test_classes_go_before_priorities_and_priorities_before_arrival():
    driver = Driver()
    for priority in (12, 3, 10, 3, -5, 11):
        driver.add(priority=priority)
    assert driver.take_all() == [4, 1, 3, 2, 5, 0]


def test_one_that_was_placed_before_goes_before_all_of_its_class_and_tenant_and_no_other():
    driver = Driver()
    first = driver.add(priority=11)
    assert driver.take() == 0
    driver.add(priority=10)
    driver.add(priority=0)
    driver.queue.push(first, num_tokens=1, now_s=0.0)
    assert driver.take_all() == [2, 0, 1]


def test_a_request_ages_by_a_class_and_then_to_the_order_of_arrival():
    driver = Driver()
    old = driver.add(priority=15)
    for seconds, rank in ((4.9, 2), (5.0, 1), (9.9, 1), (10.0, 0)):
        assert driver.queue.advance(seconds) == []
        newer = [driver.add(priority=-1, now_s=seconds), driver.add(priority=0, now_s=seconds)]
        order = []
        while (entry := driver.queue.head()) is not None:
            order.append(entry)
            driver.queue.remove(entry)
        newer.insert(rank, old)
        if rank == 1:  # as the best of the first class: after those of a better priority, before equals that came later
            assert order == [newer[0], old, newer[2]]
        else:
            assert order == newer
        driver = Driver()
        old = driver.add(priority=15)


@pytest.mark.parametrize("class_ageing_s", [0.0, 5.0])
def test_under_a_stream_of_better_requests_the_worst_is_served_within_its_ageing_and_never_without(class_ageing_s):
    config = SchedulingConfig(class_names=("fast", "slow"), class_priorities=(0, 10), class_ageing_s=class_ageing_s)
    driver = Driver(config)
    worst = driver.add(priority=20)
    served_s = None
    for second in range(60):
        driver.queue.advance(float(second))
        driver.add(priority=-1, now_s=float(second))
        if driver.take() == worst.item:
            served_s = second
            break
        driver.add(priority=-1, now_s=float(second))  # two come for each that is served
    assert served_s == (None if class_ageing_s == 0 else 10)


def test_deadlines_end_those_that_wait_and_not_those_that_were_placed():
    driver = Driver()
    placed = driver.add(deadline_s=1.0)
    assert driver.take() == placed.item
    driver.queue.push(placed, num_tokens=1, now_s=0.0)
    late = driver.add(deadline_s=2.0, priority=10)
    lifted = driver.add(deadline_s=2.0)
    lifted.deadline_s = None
    assert driver.queue.advance(1.9) == []
    assert driver.queue.advance(2.0) == [late]
    assert late not in driver.queue and len(driver.queue) == 2


def test_a_tenant_that_was_away_does_not_catch_up_and_a_weight_is_a_share():
    config = SchedulingConfig(tenant_names=("b",), tenant_weights=(3.0,))
    driver = Driver(config)
    for _ in range(50):
        driver.add(tenant="a")
    assert driver.take_all() == list(range(50))
    for _ in range(40):
        driver.add(tenant="a")
        driver.add(tenant="b")
    tenants = []
    for _ in range(40):
        entry = driver.queue.head()
        tenants.append(entry.tenant)
        driver.queue.placed(entry, 100)
    assert tenants.count("b") == pytest.approx(30, abs=1)


def test_short_requests_pass_a_long_one_of_their_own_tenant_where_it_may_not_go():
    driver = Driver(SchedulingConfig(long_prefill_tokens=10))
    driver.add(num_tokens=11)
    driver.add(num_tokens=10)
    assert driver.take(may_be_long=False) == 1
    assert driver.take(may_be_long=False) is None
    assert driver.take() == 0


def test_who_would_be_over_a_budget_goes_after_all_of_the_class_who_would_not():
    driver = Driver()
    driver.add(tenant="a")
    driver.add(tenant="b")
    driver.add(tenant="a", priority=10)
    driver.add(tenant="b", priority=10)
    order = []
    while (number := driver.take(is_over=lambda entry: entry.tenant == "a")) is not None:
        order.append(number)
    assert order == [1, 0, 3, 2]


def test_names_that_clients_make_up_and_requests_that_end_unplaced_leave_nothing_behind():
    driver = Driver()
    blocked = driver.add(tenant="t")
    for number in range(5000):
        driver.queue.remove(driver.add(tenant="t", deadline_s=1e9))
        driver.queue.remove(driver.add(tenant=f"made up {number}"))
    queue = driver.queue
    assert len(queue._ageing) + len(queue._deadlines) < 1000
    assert len(queue._classes[0].tenants) < 200
    assert sum(map(len, queue._classes[0].tenants["t"].heaps)) < 200
    assert queue.head() is blocked


class QueueMachine(RuleBasedStateMachine):
    """Random arrivals, placements, preemptions, ends and time against plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(
            SchedulingConfig(
                class_names=("x", "y", "z"),
                class_priorities=(0, 10, 20),
                class_ageing_s=3.0,
                tenant_names=("a", "b"),
                tenant_weights=(1.0, 2.5),
                long_prefill_tokens=50,
            )
        )
        self.waiting: list[Entry[int]] = []
        self.placed: list[Entry[int]] = []
        self.deadlines: dict[tuple[int, int], float] = {}  # of those never placed, by order
        self.now_s = 0.0
        self.virtual_times = [0.0] * 3

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(-3, 25),
        num_tokens=st.integers(1, 100),
        patience_s=st.none() | st.floats(0.0, 8.0),
    )
    def arrive(self, tenant, priority, num_tokens, patience_s):
        deadline_s = None if patience_s is None else self.now_s + patience_s
        if deadline_s is not None:
            self.deadlines[(self.driver.num_added, 0)] = deadline_s
        self.waiting.append(
            self.driver.add(
                tenant=tenant, priority=priority, num_tokens=num_tokens, now_s=self.now_s, deadline_s=deadline_s
            )
        )

    @rule(may_be_long=st.booleans())
    def place(self, may_be_long):
        head = self.driver.queue.head(may_be_long=may_be_long)
        able = [entry for entry in self.waiting if may_be_long or not entry.is_long]
        assert (head is None) == (not able)
        if head is None:
            return
        assert head.class_index == min(entry.class_index for entry in able)
        peers = [e for e in able if (e.class_index, e.tenant) == (head.class_index, head.tenant)]
        assert head is min(peers, key=lambda e: (not e.was_placed, e.priority, e.order))
        self.driver.queue.placed(head, 7)
        self.waiting.remove(head)
        self.placed.append(head)
        self.deadlines.pop(head.order, None)

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), is_preempted=st.booleans())
    def leave(self, data, is_preempted):
        entry = self.placed.pop(data.draw(st.integers(0, len(self.placed) - 1)))
        self.driver.queue.charge(entry.class_index, entry.tenant, 3)
        if is_preempted:
            self.driver.queue.push(entry, num_tokens=10, now_s=self.now_s)
            self.waiting.append(entry)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        self.driver.queue.remove(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @rule(seconds=st.floats(0.0, 4.0))
    def pass_time(self, seconds):
        self.now_s += seconds
        late = [e for e in self.waiting if e.order in self.deadlines and self.deadlines[e.order] <= self.now_s]
        expired = self.driver.queue.advance(self.now_s)
        assert sorted(e.order for e in expired) == [e.order for e in sorted(late, key=lambda e: e.order)]
        self.waiting = [entry for entry in self.waiting if entry not in expired]

    @invariant()
    def nothing_is_lost(self):
        queue = self.driver.queue
        queue.check_integrity()
        assert sorted(e.order for e in queue) == sorted(e.order for e in self.waiting) and len(queue) == len(
            self.waiting
        )

    @invariant()
    def virtual_times_rise(self):
        times = [self.driver.queue.virtual_time(index) for index in range(3)]
        assert all(new >= old for new, old in zip(times, self.virtual_times, strict=True))
        self.virtual_times = times


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
