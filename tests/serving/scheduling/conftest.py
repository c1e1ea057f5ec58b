"""A device and an engine loop to drive the scheduler with, both plain Python, and the oracle: a request run alone.

The device holds, for each place in the KV pool, a hash of the whole prefix that the place belongs to (tokens and rope
regime). Before it samples it compares all places of the sequence with what they must hold, so a page shared, reused,
freed or published wrongly is seen at once. The sampled token is a function of that hash: any slip changes the output.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from configs.engine import mixed_decode_sizes
from serving.request import DEFAULT_TENANT, FinishReason, Request, RequestContext, RequestStatus, SamplingParams
from serving.scheduling.config import RopeRegime, SchedulerConfig
from serving.scheduling.schedule import Schedule, StepLimits
from serving.scheduling.scheduler import NO_TOKEN, NOT_FINITE, Scheduler, StepEvent

VOCAB_SIZE = 50  # small, so that stop tokens and shared pages turn up by chance


def mix(state: int, value: int) -> int:
    """One step of a 64-bit hash (the finaliser of SplitMix64)."""
    state = (state ^ (value + 1)) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    return state ^ state >> 27


def rope_state(rope: RopeRegime, num_prompt_tokens: int, rope_len: int) -> int:
    """What a hash starts from: all that K/V depend on besides the tokens."""
    if rope.longrope_limit is not None:
        return 1 if max(num_prompt_tokens, rope_len) > rope.longrope_limit else 2
    if rope.dynamic_limit is not None and num_prompt_tokens > rope.dynamic_limit:
        return 3 + num_prompt_tokens
    return 0


def sample(state: int, request: Request) -> int:
    return mix(mix(state, request.seed), request.child_index) % VOCAB_SIZE


def solo(request: Request, rope: RopeRegime) -> tuple[list[int], FinishReason, int | None]:
    """Output, finish reason and stop reason of a request with the whole machine to itself."""
    tokens, num_prompt = list(request.prompt_token_ids), request.num_prompt_tokens
    num_hashed, regime = 0, None
    while len(tokens) < request.max_total_tokens:
        current = rope_state(rope, num_prompt, len(tokens) if rope.longrope_limit is not None else 0)
        if current != regime:
            regime = state = current
            num_hashed = 0
        for token_id in tokens[num_hashed:]:
            state = mix(state, token_id)
        num_hashed = len(tokens)
        tokens.append(sample(state, request))
        if tokens[-1] in request.stop_token_ids and len(tokens) - num_prompt > request.params.min_tokens:
            return tokens[num_prompt:], FinishReason.STOP, tokens[-1]
    return tokens[num_prompt:], FinishReason.LENGTH, None


@dataclass
class Row:
    """What the device knows of a slot."""

    request: Request
    page_table: list[int]
    tokens: list[int]
    states: list[int]  # states[i]: hash of tokens[: i + 1]
    initial_state: int
    num_output_tokens: int
    is_active: bool = False
    is_poisoned: bool = False


class FakeRunner:
    """Executes schedules as the device would, and asserts what no device can check."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.rows: list[Row | None] = [None] * config.max_num_seqs
        self.pool = np.zeros(config.num_pages * config.page_size, np.uint64)
        self.is_nan = np.zeros((config.num_pages, config.page_size), bool)
        self.poison_after: dict[tuple[str, int], int] = {}  # (request id, child) -> output tokens before NaN
        self.written_pages: dict[int, set[int]] = {}  # step id -> pages it wrote

    def run(self, schedule: Schedule) -> np.ndarray:
        config = self.config
        written = self.written_pages[schedule.step_id] = set()
        pages = self.pool.reshape(-1, config.page_size)
        for out in schedule.swap_outs:
            assert not out.copy.batches and not self.is_nan[list(out.page_ids)].any()
            out.copy.batches[:] = pages[list(out.page_ids)]
        self.is_nan[list(schedule.zero_pages)] = False
        pages[list(schedule.zero_pages)] = 0
        targets = [copy.target for copy in schedule.page_copies]
        assert len(set(targets)) == len(targets)
        assert not any(copy.source in targets[:place] for place, copy in enumerate(schedule.page_copies))
        for copy in schedule.page_copies:
            for places in (self.is_nan, pages):
                places[copy.target] = 0
                places[copy.target, : copy.num_tokens] = places[copy.source, : copy.num_tokens]
            written.add(copy.target)
        for swap_in in schedule.swap_ins:
            copy, stop = swap_in.copy, swap_in.first + len(swap_in.page_ids)
            assert len(copy.batches) == copy.num_pages == stop
            if swap_in.page_ids:  # else all of them are still in the prefix cache
                pages[list(swap_in.page_ids)] = copy.batches[swap_in.first : stop]
            copy.batches.clear()
            written.update(swap_in.page_ids)
        for slot in schedule.deactivate:
            if self.rows[slot] is not None:
                self.rows[slot].is_active = False
        assert not {m.source for m in schedule.moves} & {m.target for m in schedule.moves}
        for move in schedule.moves:
            self.rows[move.target], self.rows[move.source] = self.rows[move.source], None
        for reset in schedule.resets:
            request = reset.request
            state = initial_state = rope_state(config.rope, request.num_prompt_tokens, request.rope_len)
            tokens = [*request.prompt_token_ids, *request.output_token_ids]
            states = []
            for token_id in tokens:
                states.append(state := mix(state, token_id))
            table = list(reset.page_ids)
            if reset.is_decoding:
                states.pop()  # of the last token, which this step computes
            self.rows[reset.slot] = Row(
                request, table, tokens, states, initial_state, request.num_output_tokens, is_active=reset.is_decoding
            )
        assert len({append.slot for append in schedule.page_appends}) == len(schedule.page_appends)
        for append in schedule.page_appends:
            table = self.rows[append.slot].page_table
            assert append.page_index == len(table)
            table.append(append.page_id)
        for row in self.rows:
            assert row is None or not (row.is_active and row.request.is_finished), "an ended request is still active"

        num_rows = schedule.num_decode_slots or config.max_num_seqs
        tokens = np.full((schedule.num_decode_steps, num_rows), NO_TOKEN, np.int32)
        for chunk in schedule.prefill:  # all K/V is written before anything is read
            row = self.rows[chunk.slot]
            assert row.request is chunk.request and not row.is_active
            stop = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids and list(chunk.token_ids) == row.tokens[chunk.start : stop]
            for position in range(chunk.start, stop):
                self._write(row, position, written)
        decoding = [(slot, self.rows[slot], request) for slot, request in schedule.decode]
        for slot, row, request in decoding:
            assert row.request is request and slot not in {chunk.slot for chunk in schedule.prefill}
            if request.needs_last_token:
                assert schedule.num_decode_steps == 1 and len(row.tokens) == request.num_tokens
        for step in range(schedule.num_decode_steps):
            for slot, row, _ in decoding:
                if row.is_active:
                    row.states.append(mix(row.states[-1] if row.states else row.initial_state, row.tokens[-1]))
                    self._write(row, len(row.tokens) - 1, written)
                    tokens[step, slot] = self._sample(row, len(row.tokens))
        for chunk in schedule.prefill:
            row = self.rows[chunk.slot]
            stop = chunk.start + len(chunk.token_ids)
            self._check_reads(row, stop)
            if chunk.samples:
                assert stop == len(row.tokens)
                row.is_active = True
                tokens[0, chunk.slot] = self._sample(row, stop)
        return tokens

    def _write(self, row: Row, position: int, written: set[int]) -> None:
        assert position < row.request.max_total_tokens and position < self.config.max_model_len
        page_id = row.page_table[position // self.config.page_size]
        assert page_id != 0
        self.pool[page_id * self.config.page_size + position % self.config.page_size] = row.states[position]
        self.is_nan[page_id, position % self.config.page_size] = row.is_poisoned
        written.add(page_id)

    def _check_reads(self, row: Row, num_tokens: int) -> None:
        if row.is_poisoned:
            return
        page_size = self.config.page_size
        kv = self.pool.reshape(-1, page_size)[row.page_table].reshape(-1)
        assert np.array_equal(kv[:num_tokens], np.array(row.states[:num_tokens], np.uint64)), "foreign K/V"
        assert not self.is_nan[row.page_table].any(), "K/V that is not finite"

    def _sample(self, row: Row, num_tokens: int) -> int:
        self._check_reads(row, num_tokens)
        request = row.request
        if row.num_output_tokens >= self.poison_after.get((request.request_id, request.child_index), 2**31):
            # The NaN is in the K/V of this step; the row may well go on, and poison what it writes next.
            row.is_poisoned = True
            index, place = divmod(num_tokens - 1, self.config.page_size)
            self.is_nan[row.page_table[index], place] = True
            row.is_active = num_tokens % 2 == 0 and num_tokens + 1 < request.max_total_tokens
            row.tokens.append(0)
            return NOT_FINITE
        token_id = sample(row.states[num_tokens - 1], request)
        row.tokens.append(token_id)
        row.num_output_tokens += 1
        if (token_id in request.stop_token_ids and row.num_output_tokens > request.params.min_tokens) or len(
            row.tokens
        ) >= request.max_total_tokens:
            row.is_active = False
        return token_id


@dataclass
class Engine:
    """The loop around a scheduler: runs `depth` steps ahead of the tokens it reads, checks everything at each step."""

    config: SchedulerConfig
    depth: int = 1
    now_s: float = 0.0  # the clock, which tests set
    limits: StepLimits | None = None  # of each step, which tests set
    check_interval: int = 1  # schedules and updates between two integrity checks, which read every page
    scheduler: Scheduler = field(init=False)
    runner: FakeRunner = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config)
        self.in_flight: deque[tuple[Schedule, np.ndarray]] = deque()
        self.requests: dict[tuple[str, int], Request] = {}
        self.streamed: dict[tuple[str, int], list[int]] = {}
        self.finish_after: dict[tuple[str, int], int] = {}  # a stop string seen after so many output tokens
        self.schedules: list[Schedule] = []
        self.expired: list[Request] = []
        self.max_unused_page_tokens = 0
        self.num_changes = 0

    def check_integrity(self) -> None:
        self.num_changes += 1
        if self.num_changes % self.check_interval == 0:
            self.scheduler.check_integrity()

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        key = (request.request_id, request.child_index)
        self.requests[key] = request
        self.streamed[key] = list(request.output_token_ids)
        return request

    def update(self) -> list[StepEvent]:
        schedule, tokens = self.in_flight.popleft()
        events = self.scheduler.update(schedule, tokens)
        for event in events:
            request = event.request
            key = (request.request_id, request.child_index)
            stream = self.streamed[key]
            assert [*tokens[: len(event.new_token_ids), event.slot]] == [*event.new_token_ids]
            stream += event.new_token_ids
            assert stream == request.output_token_ids
            assert event.finished == request.is_finished
            limit = self.finish_after.get(key)
            if limit is not None and len(stream) >= limit:
                self.scheduler.finish(request, FinishReason.STOP, "stop string")
                del stream[limit:]
        self.check_integrity()
        return events

    def step(self) -> bool:
        """Schedule and dispatch a step, read the one before. False: nothing left to do."""
        scheduler = self.scheduler
        schedule = scheduler.schedule(self.now_s, self.limits)
        self.expired += scheduler.take_expired()
        self.check_integrity()
        if schedule is None:
            assert scheduler.needs_drain == bool(self.in_flight)
            if not self.in_flight:
                assert not scheduler.has_work()
                return False
            self.update()
            return True
        self.check(schedule)
        self.schedules.append(schedule)
        self.in_flight.append((schedule, self.runner.run(schedule)))
        self.max_unused_page_tokens = max(self.max_unused_page_tokens, scheduler.num_unused_page_tokens)
        while len(self.in_flight) > self.depth:
            self.update()
        return True

    def run(self, max_steps: int = 20000) -> None:
        """Step until idle, then check that nothing is left behind."""
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        self.check_idle()

    def check(self, schedule: Schedule) -> None:
        """Promises of a schedule that hold whatever the requests are."""
        config = self.config
        padded = sum(-(-len(c.token_ids) // config.query_block) * config.query_block for c in schedule.prefill)
        bucket = min(size for size in (0, *config.prefill_token_buckets) if size >= padded)
        assert schedule.prefill_bucket == bucket
        assert schedule.decode or schedule.prefill
        assert schedule.num_decode_steps in (1, config.max_decode_steps)
        assert schedule.num_decode_steps == 1 or not schedule.prefill
        slots = [slot for slot, _ in schedule.decode] + [chunk.slot for chunk in schedule.prefill]
        assert len(set(slots)) == len(slots)
        if schedule.decode:  # the smallest program there is that holds all of them
            sizes = mixed_decode_sizes(config.decode_sizes, bucket) if bucket else config.decode_sizes
            assert schedule.num_decode_slots == min(size for size in sizes if size > max(slots))
        else:
            assert schedule.num_decode_slots == 0
        assert not {reset.slot for reset in schedule.resets} & set(schedule.deactivate)
        for request in [r for _, r in schedule.decode] + [c.request for c in schedule.prefill]:
            assert request.status is RequestStatus.RUNNING
        new_pages = {page_id for reset in schedule.resets for page_id in reset.page_ids}
        new_pages |= {append.page_id for append in schedule.page_appends}
        # A completion that shares the prompt of another reads after the step in flight that writes it.
        new_pages = {page_id for page_id in new_pages if self.scheduler.page_allocator.ref_count(page_id) == 1}
        for running, _ in self.in_flight:
            assert not new_pages & self.runner.written_pages[running.step_id], (
                "a step in flight writes a page given out"
            )

    def check_idle(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_work() and scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.page_allocator.num_free_pages == self.config.num_pages - 1
        assert scheduler.page_allocator.num_quarantined_pages == scheduler.page_allocator.num_held_pages == 0
        assert scheduler.host_pool.num_used_bytes == 0
        assert all(request.is_finished for request in self.requests.values())

    def check_outputs(self) -> None:
        """Every request that was not cut short has the output of a solo run, every other a prefix of it."""
        for key, request in self.requests.items():
            output, reason, stop_reason = solo(request, self.config.rope)
            stream = self.streamed[key]
            if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT):
                assert stream == output[: len(stream)], key
            elif request.stop_reason == "stop string":
                assert stream == output[: self.finish_after[key]], key
            else:
                assert stream == output[: self.finish_after.get(key)], key
                assert (request.finish_reason, request.stop_reason) == (reason, stop_reason), key


def make_config(**changes) -> SchedulerConfig:
    values = {
        "page_size": 4,
        "num_pages": 65,
        "decode_sizes": (4,),
        "max_model_len": 128,
        "prefill_token_buckets": (16,),
        "query_block": 4,
        "max_decode_steps": 4,
    }
    return SchedulerConfig(**(values | changes))


def make_request(
    request_id: str,
    prompt: list[int] | tuple[int, ...],
    max_tokens: int = 8,
    *,
    max_model_len: int = 128,
    child_index: int = 0,
    seed: int = 0,
    cache_salt: bytes = b"",
    tenant: str = DEFAULT_TENANT,
    priority: int = 0,
    deadline_s: float | None = None,
    arrival_time_s: float = 0.0,
    **params,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=sampling,
        max_total_tokens=min(max_model_len, len(prompt) + max_tokens),
        stop_token_ids=sampling.stop_token_ids,
        child_index=child_index,
        seed=seed,
        cache_salt=cache_salt,
        context=RequestContext(tenant=tenant, priority=priority, deadline_s=deadline_s),
        arrival_time_s=arrival_time_s,
    )


@dataclass(frozen=True)
class Tools:
    """What tests of this folder share; test folders are no packages, so a fixture hands it out."""

    FakeRunner = FakeRunner
    Engine = Engine
    VOCAB_SIZE = VOCAB_SIZE
    solo = staticmethod(solo)
    make_config = staticmethod(make_config)
    make_request = staticmethod(make_request)

    @staticmethod
    def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # pytest shows it where the test fails
    return random.Random(seed)
