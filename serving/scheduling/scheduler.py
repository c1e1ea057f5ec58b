"""Decides each step: which requests run, how many tokens of each, in which pages.

One rule: a request gets tokens until `num_computed_tokens` catches up with what it has. Chunked prefill, prefix hits
and recompute after preemption follow from it; a sequence that was swapped to the host has its number back. Who is
placed next, `waiting_queue` decides; who is placed goes by class and arrival. Who gives way goes by `_keep_rank`: the
worst class, borrowers, the fewest output tokens, each request a bounded number of times. Once all have given way so
often, the one of the best class with the most output stays, so that something always ends.

The engine runs ahead: it calls `schedule()` for the next step before it calls `update()` for the last one. So
`num_computed_tokens` counts dispatched work; a decoding request's next position is known although its token is not.
The device stops a slot by the rules of `stop_after`; `update` applies the same rules when it reads the tokens.

Pages for all known tokens of a sequence are taken at admission, all or none: a request in prefill cannot run out of
pages halfway, and holds more than it uses only until its chunks have run, a few steps. Decode then takes one page at
a time.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from serving.request import FinishReason, Request, RequestError, RequestStatus
from serving.scheduling.config import SchedulerConfig
from serving.scheduling.eviction import EvictionOrder
from serving.scheduling.forking import ForkSource, KeptPages
from serving.scheduling.page_allocator import PageAllocator
from serving.scheduling.pending_prefixes import PendingPrefixes
from serving.scheduling.pinned_prefixes import PinnedPrefixes
from serving.scheduling.prefix_cache import CachedPage, HashedPrompt, PageChain, PrefixCache, sha256_digest
from serving.scheduling.prefix_salts import PrefixSalts
from serving.scheduling.schedule import (
    PageAppend,
    PageCopy,
    Preemption,
    PreemptionReason,
    PrefillChunk,
    Schedule,
    SlotMove,
    SlotReset,
    StepLimits,
)
from serving.scheduling.swap import HostCopy, HostPool
from serving.scheduling.tenants import KvBudgets
from serving.scheduling.waiting_queue import Entry, Order, WaitingLoad, WaitingQueue

MAX_IDLE_SHARE = 1 / 16  # of the slot steps of a dispatch, while a request waits
MAX_PAUSE = 4  # steps in a row that background sits out for others' prompts
MAX_NEW_PREFIX_WAITS = 64  # in a step: finding out whether to wait takes hashes of the whole prompt

NO_TOKEN = -1  # the slot sampled nothing at this step
NOT_FINITE = -2  # the slot's logits were not finite


def stop_after(request: Request) -> tuple[FinishReason, int | None] | None:
    """Whether the request ends with its newest output token: (reason, stop token id), or None to go on.

    The device applies the same rule: a stop token ends a request that had at least min_tokens output tokens before
    it (until then none is sampled); else the bound max_total_tokens does.
    """
    output = request.output_token_ids
    if output[-1] in request.stop_token_ids and len(output) > request.params.min_tokens:
        return FinishReason.STOP, output[-1]
    if len(request.prompt_token_ids) + len(output) >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None


@dataclass(slots=True)  # not frozen, which would take four times as long: there are hundreds a step
class StepEvent:
    """What one step brought one request. `new_token_ids[k]` was sampled by decode step k of `slot`."""

    request: Request
    slot: int
    new_token_ids: tuple[int, ...]
    finished: bool  # request.finish_reason, stop_reason and error tell how


@dataclass(kw_only=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0  # dispatched
    num_drains: int = 0  # schedule() gave way to the update of a step in flight
    num_prefill_tokens: int = 0
    num_prefill_padding_tokens: int = 0  # tokens of query_block rows that chunks left empty
    num_decode_steps: int = 0  # forward passes in which slots decode
    num_decode_slot_steps: int = 0  # slots of the program * K for each step that decodes: what fixed shapes pay
    num_slot_moves: int = 0  # to lower slots, so that a smaller decode program does
    num_output_tokens: int = 0
    num_preemptions: int = 0  # for memory, and for requests of better classes or within their tenants' budgets
    num_deadline_drops: int = 0  # requests that had no slot by their deadline
    num_rope_restarts: int = 0  # sequences that outgrew their rope regime
    num_prefix_query_tokens: int = 0  # of admitted requests that may read the prefix cache
    num_prefix_hit_tokens: int = 0  # of these, found there or taken over from another completion of the request
    num_prefix_waits: int = 0  # times that a request waited for a prefix that another one was computing
    num_forks: int = 0  # admissions that took over pages of a sequence with the same first tokens


@dataclass(eq=False, slots=True)
class _Sequence:
    """What the scheduler knows of an unfinished request beyond the request itself."""

    # [0, num_confirmed_tokens)                    K/V in pages, by steps that were read and were finite
    # [num_confirmed_tokens, num_computed_tokens)  K/V in pages once the steps in flight have run
    # [num_tokens, num_future_tokens)              sampled by steps in flight, not read yet
    request: Request
    order: tuple[int, int]  # of arrival; then, among those forked of one request, of their making
    max_pages: int  # that it can ever fill
    num_future_tokens: int
    num_prompt_tokens: int  # the request's
    max_total_tokens: int  # the request's
    stop_token_ids: frozenset[int]  # the request's
    needs_last_token: bool  # the request's
    entry: Entry[_Sequence] = field(init=False)
    account: tuple[int, str] = (0, "")  # class and tenant that its tokens count for, while it runs
    slot: int | None = None
    page_ids: list[int] = field(default_factory=list)
    num_page_tokens: int = 0  # that these pages hold
    num_hit_pages: int = 0  # of those, from the prefix cache or another sequence
    chain: PageChain | None = None  # None: no prefix caching
    awaited_page: bytes | None = None  # hash of the last page of the prefix that it waits for
    regime_tokens: int = 0  # positions [0, regime_tokens) may be computed in the rope regime of the K/V
    is_decoding: bool = False  # all known tokens were dispatched; from here the slot goes on by itself
    num_confirmed_tokens: int = 0
    last_step_id: int = 0  # the last step it was dispatched in
    host_copy: HostCopy | None = None  # of its K/V, while it waits after a preemption

    @property
    def num_in_flight_tokens(self) -> int:
        return self.num_future_tokens - self.request.num_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be sampled after the steps in flight."""
        return self.request.max_total_tokens - self.num_future_tokens

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens of positions [start, stop)."""
        prompt, output = self.request.prompt_token_ids, self.request.output_token_ids
        num_prompt = len(prompt)
        if stop <= num_prompt:
            return prompt[start:stop]
        return prompt[start:num_prompt] + tuple(output[max(start - num_prompt, 0) : stop - num_prompt])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Where a waiting sequence would begin, and what it would take."""

    match: list[CachedPage]  # with its first tokens
    source: ForkSource | None  # a sequence of which it would take over more than that
    shared_page_ids: list[int]  # with its first tokens, of both
    num_new_pages: int
    num_taken_pages: int  # free and evictable ones, those of shared_page_ids included


def _run_order(sequence: _Sequence) -> tuple[int, tuple[int, int]]:
    return sequence.entry.class_index, sequence.order


def _key(request: Request) -> tuple[str, int]:
    return request.request_id, request.child_index


class Scheduler:
    """Owns requests from `add` until they are finished, and with them slots, pages and the prefix cache.

    `schedule()` returns the next step or None; with None, `needs_drain` says that the oldest step in flight must be
    given to `update()` before anything more can be scheduled. Steps are updated in the order they were scheduled.
    Not thread-safe: one loop owns it.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.stats = SchedulerStats()
        self.needs_drain = False
        self.prefix_cache: PrefixCache | None = None
        if config.enable_prefix_caching:
            self.prefix_cache = PrefixCache(config.page_size)
            if config.prefix_cache_scope == "tenant":  # those who do not trust each other could make collisions
                self.prefix_cache.hash_fn = sha256_digest
        floor_pages = int(config.prefix_cache_floor * (config.num_pages - 1))
        order = EvictionOrder(config.page_size, config.num_pages, config.recompute_cost, floor_pages)
        self.page_allocator = PageAllocator(config.num_pages, self.prefix_cache, order)
        self.pinned_prefixes: PinnedPrefixes | None = None
        if self.prefix_cache is not None:
            self.pinned_prefixes = PinnedPrefixes(self.prefix_cache, self.page_allocator, config.max_pinned_pages)
        self._salts = PrefixSalts(config.prefix_cache_scope)
        self._pending_prefixes = PendingPrefixes()
        self.host_pool = HostPool(config.swap, self.prefix_cache)
        self._sequences: dict[str, dict[int, _Sequence]] = {}  # request id -> child index -> unfinished sequence
        self._sequence_of: dict[int, _Sequence] = {}  # the same by id() of the request, which the sequence keeps alive
        self._waiting: WaitingQueue[_Sequence] = WaitingQueue(config.policy)
        self._running: list[_Sequence] = []  # by class, then in order of arrival
        self._num_running_of_class = [0] * len(config.policy.class_names)
        self._budgets = KvBudgets(config.policy)
        self._expired: list[Request] = []  # for `take_expired`
        self.ended: list[Request] | None = None  # since the controller last emptied it; None: there is none
        self._now_s = 0.0  # of the last schedule()
        self._num_new_prefix_waits = 0  # in this schedule()
        self._max_num_seqs = config.max_num_seqs  # of the last schedule(): those that may run, by its limits
        self._limits: StepLimits | None = None
        self._num_paused = 0  # steps in a row that background has sat out
        self._preemptions: list[Preemption] = []  # for the next schedule
        self._served: dict[tuple[int, str], int] = {}  # in this update(): output tokens by class and tenant
        self._free_slots = list(range(config.max_num_seqs))  # a heap: the lowest first
        self._deactivate: set[int] = set()  # for the next schedule
        self._zero_pages: dict[int, None] = {}  # for the next schedule
        self._page_copies: list[PageCopy] = []  # for the next schedule
        self._kept_pages: dict[tuple[str, int], KeptPages] = {}  # of finished requests, by id and child index
        self._in_flight: deque[int] = deque()  # ids of steps scheduled and not updated
        self._next_step_id = 1
        self._num_added = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pinned_pages(self) -> int:
        """Cached pages that pinned prefixes hold."""
        return 0 if self.pinned_prefixes is None else self.pinned_prefixes.num_held_pages

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens, prompt and output, that waiting requests have: what is to be computed less prefix hits."""
        return sum(self._waiting.load.num_tokens)

    @property
    def waiting_load(self) -> WaitingLoad:
        """The same by class; not to be changed."""
        return self._waiting.load

    @property
    def running_requests(self) -> list[tuple[Request, int]]:
        """Each with the tokens, prompt and output, that it has once the steps in flight are read."""
        return [(s.request, s.num_future_tokens) for s in self._running]

    @property
    def prefilling_requests(self) -> list[Request]:
        """Those that run and have known tokens to be dispatched."""
        return [s.request for s in self._running if not s.is_decoding]

    @property
    def num_unused_page_tokens(self) -> int:
        """Tokens that the pages of running requests could hold beyond those they have: the waste of paging."""
        return sum(max(s.num_page_tokens - s.num_future_tokens, 0) for s in self._running)

    def has_work(self) -> bool:
        """Whether a request is unfinished or a step awaits its update."""
        return bool(self._sequences or self._in_flight)

    # Requests in and out

    def check_room(self, num_tokens: int, max_total_tokens: int) -> int:
        """Pages that a request may come to hold. Raises RequestError where the pool is too small for it alone."""
        config = self.config
        # The last token that may be sampled is not computed.
        num_pages = config.num_pages_for(max(num_tokens, max_total_tokens - 1))
        if num_pages > config.num_pages - 1 - config.max_pinned_pages:
            pinned = f", {config.max_pinned_pages} of them for pinned prefixes" if config.max_pinned_pages else ""
            raise RequestError(
                "max_total_tokens",
                f"is {max_total_tokens}, which takes {num_pages} pages of {config.page_size} tokens; "
                f"the pool has {config.num_pages - 1}{pinned}",
            )
        return num_pages

    def hash_prompt(self, request: Request) -> HashedPrompt | None:
        """For `Request.hashed_prompt`, so that no step has to hash a whole prompt. Any thread may call it. None without a
        prefix cache."""
        if self.prefix_cache is None:
            return None
        chain = self._prompt_chain(self.prefix_cache, request)
        return HashedPrompt(chain.salt, tuple(chain.page_hashes), tuple(chain.page_tokens))

    def _prompt_chain(self, cache: PrefixCache, request: Request) -> PageChain:
        chain = cache.new_chain(self._salt(request), request.context.tenant)
        num_tokens = request.num_prompt_tokens // self.config.page_size * self.config.page_size
        cache.extend(chain, request.prompt_token_ids[:num_tokens])
        return chain

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError where it could never run: no room, or an id in use."""
        assert request.status is RequestStatus.WAITING and request.num_computed_tokens == 0, request.request_id
        config = self.config
        if not request.prompt_token_ids:
            raise RequestError("prompt", "holds no tokens")
        if request.max_total_tokens > config.max_model_len:
            raise RequestError(
                "max_total_tokens",
                f"is {request.max_total_tokens}; this engine holds sequences of at most {config.max_model_len} tokens",
            )
        min_total_tokens = request.num_tokens + (0 if request.params.max_tokens == 0 else 1)
        if request.max_total_tokens < min_total_tokens:
            raise RequestError(
                "max_total_tokens",
                f"is {request.max_total_tokens}; the prompt of {request.num_tokens} tokens needs {min_total_tokens}",
            )
        num_pages = self.check_room(request.num_tokens, request.max_total_tokens)
        children = self._sequences.setdefault(request.request_id, {})
        if request.child_index in children:
            raise RequestError("request_id", f"{request.request_id!r} is in use")
        order = (self._num_added, 0)
        deadline_s = request.context.deadline_s
        if request.fork_of is not None:  # takes the place of what it goes on with, which has begun
            order = (self._kept_pages[_key(request.fork_of)].order[0], self._num_added)
            deadline_s = None
        sequence = _Sequence(
            request=request,
            order=order,
            max_pages=num_pages,
            num_future_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            max_total_tokens=request.max_total_tokens,
            stop_token_ids=frozenset(request.stop_token_ids),
            needs_last_token=request.needs_last_token,
        )
        context = request.context
        sequence.entry = self._waiting.entry(
            sequence,
            tenant=context.tenant,
            priority=context.priority,
            order=order,
            deadline_s=deadline_s,
        )
        self._num_added += 1
        children[request.child_index] = sequence
        self._sequence_of[id(request)] = sequence
        self._waiting.push(sequence.entry, num_tokens=request.num_tokens, now_s=request.arrival_time_s)

    def abort(self, request_id: str) -> list[Request]:
        """End all unfinished requests of this id, at whatever stage; returns them. Unknown and finished ids: none.

        Pages that finished ones keep stay until `release_pages`.
        """
        sequences = list(self._sequences.get(request_id, {}).values())
        for sequence in sequences:
            self._finish(sequence, FinishReason.ABORT)
        return [sequence.request for sequence in sequences]

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        error: str | None = None,
    ) -> bool:
        """End one request early, as for a stop string. False: it was finished already and stays as it is."""
        sequence = self._find(request)
        if sequence is None:
            return False
        self._finish(sequence, reason, stop_reason, error=error)
        return True

    def take_expired(self) -> list[Request]:
        """Requests that schedule() ended since the last call, for their deadline: no step will tell of them."""
        expired, self._expired = self._expired, []
        return expired

    def release_pages(self, request: Request) -> None:
        """Give back what a finished request keeps (`Request.keeps_pages`), if it does. Forks of it that were not
        admitted compute everything themselves."""
        kept = self._kept_pages.pop(_key(request), None)
        if kept is not None:
            self.page_allocator.free(kept.page_ids, after_step=kept.last_step_id)

    # One step

    def schedule(self, now_s: float = 0.0, limits: StepLimits | None = None) -> Schedule | None:
        """Decide the next step. None: nothing can run now; `needs_drain` tells whether an update would change that.

        now_s: of the clock of arrival times and deadlines, seconds. See `take_expired`. limits: what the step may take
        at most; None: the config's sizes.
        """
        self.needs_drain = False
        self._now_s = now_s
        self._limits = limits
        self._max_num_seqs = self.config.max_num_seqs
        if limits is not None:
            self._max_num_seqs = min(max(limits.max_num_seqs, 1), self._max_num_seqs)
        self._resume_waits()
        self._drop_expired()
        self._num_new_prefix_waits = 0
        self._restart_outgrown_sequences()
        resets = self._admit_urgent()
        ready = None if resets is None else self._make_room_to_decode({reset.slot for reset in resets})
        if resets is None or ready is None:
            self._give_way()
            return None
        decoding, lacking, is_one_left_out = ready

        # Moves come before resets on the device, and these resets are fixed.
        moves = self._move_down() if decoding and not resets else []
        appends = [self._append_page(s) for s in lacking]
        chunks: list[PrefillChunk] = []
        max_tokens = self._prefill_tokens(is_alone=not decoding and not self._in_flight)
        num_padded_tokens = self._prefill(max_tokens, resets, chunks, decoding)
        decoding = self._without_background(decoding, chunks)
        if not decoding and not chunks:
            self._give_way()
            return None

        num_decode_steps = 1
        # A prompt that only this step's limits hold back is let in by one of the next.
        is_held_back = not max_tokens and (
            (self._has_slot() and bool(self._waiting)) or any(not s.is_decoding for s in self._running)
        )
        if not chunks and not is_one_left_out and not is_held_back:
            lacking_for_many = self._lacking_for_many(decoding)
            if lacking_for_many is not None:
                num_decode_steps = self.config.max_decode_steps
                appends += [self._append_page(s) for s in lacking_for_many]
        return self._dispatch(decoding, num_decode_steps, chunks, num_padded_tokens, moves, resets, appends)

    def update(self, schedule: Schedule, tokens: np.ndarray) -> list[StepEvent]:
        """Take in what a step sampled. `tokens`: int32 [num_decode_steps, R], of the first R slots.

        tokens[k, slot] is the token that decode step k sampled (a chunk that samples: k = 0), -1 where the slot was
        inactive or stopped, -2 where its logits were not finite. A chunk that does not sample may say -2 as well.
        Requests finished since the step was scheduled are passed over. Events come for requests that got tokens or
        finished.
        """
        assert tokens.shape[0] == schedule.num_decode_steps, tokens.shape
        assert self._in_flight and self._in_flight[0] == schedule.step_id, (schedule.step_id, self._in_flight)
        self._in_flight.popleft()
        columns: list[list[int]] = tokens.T.tolist()
        if (tokens == NOT_FINITE).any():
            slots = [(chunk.slot, chunk.request) for chunk in schedule.prefill] + list(schedule.decode)
            if any(NOT_FINITE in columns[slot] and self._find(request) is None for slot, request in slots):
                # An ended request went wrong after its end: its pages, unknown by now, are among those in quarantine.
                self._mark_to_zero(self.page_allocator.writable_quarantined_pages)
        self.page_allocator.step_completed(schedule.step_id)
        events = []
        find = self._sequence_of.get
        for chunk in schedule.prefill:
            sequence = self._find(chunk.request)
            if sequence is not None:
                event = self._take_chunk(sequence, chunk, columns[chunk.slot][0])
                if event is not None:
                    events.append(event)
        num_steps, served = schedule.num_decode_steps, self._served
        for slot, request in schedule.decode:  # once a step for each: kept short
            sequence = find(id(request))
            if sequence is None:
                continue
            token_ids, output = columns[slot], request.output_token_ids
            num_tokens = sequence.num_prompt_tokens + len(output) + num_steps
            if (
                num_tokens < sequence.max_total_tokens
                and min(token_ids) >= 0
                and sequence.stop_token_ids.isdisjoint(token_ids)
            ):  # none of them ends it, as a rule
                output += token_ids
                sequence.num_confirmed_tokens = num_tokens - 1
                served[sequence.account] = served.get(sequence.account, 0) + num_steps
                self._publish(sequence)
                events.append(StepEvent(request, slot, tuple(token_ids), False))
            else:
                # The tokens of all earlier steps are in by now: the device stopped no later than this bound.
                num_left = sequence.max_total_tokens - sequence.num_prompt_tokens - len(output)
                events.append(self._take_tokens(sequence, slot, token_ids[:num_left]))
        for (class_index, tenant), num_tokens in self._served.items():
            self.stats.num_output_tokens += num_tokens
            self._waiting.charge(class_index, tenant, num_tokens)
        self._served.clear()
        return events

    # schedule(): its limits

    def _prefill_tokens(self, *, is_alone: bool) -> int:
        """Tokens, padded, that the step may prefill: whole query blocks. `is_alone`: nothing decodes or is in flight."""
        config = self.config
        if self._limits is None or is_alone:
            return config.max_prefill_tokens
        num_tokens = min(self._limits.max_prefill_tokens, config.max_prefill_tokens)
        return num_tokens // config.query_block * config.query_block

    def _has_slot(self, num_freed: int = 0) -> bool:
        """Whether one more sequence may run once so many others gave way."""
        return (num_freed > 0 or bool(self._free_slots)) and len(self._running) - num_freed < self._max_num_seqs

    def _is_background(self, sequence: _Sequence) -> bool:
        """One that has aged into a better class is no background any more, lest it hold up that class."""
        limits, entry = self._limits, sequence.entry
        if limits is None or limits.max_background_seqs is None or entry.class_index < entry.base_class:
            return False
        return sequence.request.context.priority >= limits.background_priority

    def _is_within_limits(self, sequence: _Sequence) -> bool:
        """Whether the step's limits let the sequence run. With none running they do."""
        limits = self._limits
        if limits is None or not self._running:
            return True
        if limits.max_background_seqs is not None and self._is_background(sequence):
            num_background = sum(s.request.context.priority >= limits.background_priority for s in self._running)
            if num_background >= limits.max_background_seqs:
                return False
        return self._has_slot()

    # schedule(): who has waited too long, and who may push others out

    def _drop_expired(self) -> None:
        for entry in self._waiting.advance(self._now_s):
            self.stats.num_deadline_drops += 1
            self._end(entry.item, FinishReason.TIMEOUT, error="it had no slot by its deadline")
            self._expired.append(entry.item.request)

    def _admit_urgent(self) -> list[SlotReset] | None:
        """Admit requests for which running ones must give way: those of worse classes, and where a tenant's budget
        would hold the request, those that others have borrowed for. None: not before the steps in flight are read.

        Nobody gives way in vain, and nobody who was admitted here: the urgent are in before anything else is placed.
        """
        resets: list[SlotReset] = []
        if self.config.static_batching or not self._running:
            return resets
        if len(self._num_running_of_class) == 1 and not self._budgets.is_used:
            return resets
        budget = self._prefill_tokens(is_alone=False)
        while budget > 0 and (entry := self._next_entry()) is not None:
            victims = self._victims_for(entry.item, {reset.slot for reset in resets})
            if not victims:
                break
            if self._in_flight:
                return None  # the victims' tokens in flight would be lost
            for victim in victims:
                self._preempt(victim, for_whom=entry.item.request, reason="priority")
            reset = self._admit(entry.item)
            if reset is None:
                break
            resets.append(reset)
            budget -= entry.item.request.num_tokens - entry.item.request.num_computed_tokens
        return resets

    def _victims_for(self, sequence: _Sequence, placed_slots: set[int]) -> list[_Sequence]:
        """Running sequences to preempt so that a waiting one gets in. None: it gets in without, or not at all."""
        entry, budgets = sequence.entry, self._budgets
        base_class = entry.base_class
        lenders = budgets.borrowers if not self._is_over_budget(entry) else ()
        first = sum(self._num_running_of_class[: base_class + (not lenders)])
        able = [
            s
            for s in self._running[first:]  # of worse classes, and where tenants borrow of the same
            if (s.entry.class_index > base_class or (s.entry.class_index == base_class and s.entry.tenant in lenders))
            and s.slot not in placed_slots
            and not self._is_worn(s)
        ]
        if not able:
            return []
        request = sequence.request
        max_growth = 1 << request.num_preemptions
        placement = self._placement(sequence)
        hits = set(placement.shared_page_ids)
        num_missing = placement.num_taken_pages
        num_missing += sum(min(s.max_pages - len(s.page_ids), max_growth) for s in self._running)
        num_missing -= self._num_pages_for(request)
        victims: list[_Sequence] = []
        given: Counter[str] = Counter()  # tokens, by tenant
        released: Counter[int] = Counter()  # holders, by page
        for victim in sorted(able, key=self._keep_rank, reverse=True):
            if num_missing <= 0 and self._has_slot(len(victims)):
                break
            tenant = victim.entry.tenant
            if victim.entry.class_index == base_class and budgets.excess(tenant, -given[tenant]) <= 0:
                continue  # what it borrowed is given back
            victims.append(victim)
            given[tenant] += victim.num_page_tokens
            num_missing -= min(victim.max_pages - len(victim.page_ids), max_growth)
            for page_id in victim.page_ids:
                released[page_id] += 1
                num_missing -= page_id not in hits and released[page_id] == self.page_allocator.ref_count(page_id)
        return victims if num_missing <= 0 and self._has_slot(len(victims)) else []

    def _is_worn(self, sequence: _Sequence) -> bool:
        """Whether it gave way as often as it must."""
        return sequence.request.num_preemptions >= self.config.policy.max_preemptions

    def _keep_rank(self, sequence: _Sequence) -> tuple[bool, int, bool, int, Order]:
        """Running sequences of the least rank are kept, those of the greatest give way: such as may still be asked to,
        of the worst class, whose tenants borrow, with the fewest output tokens (the cheapest to compute again), and
        that came last."""
        entry = sequence.entry
        return (
            not self._is_worn(sequence),
            entry.class_index,
            entry.tenant in self._budgets.borrowers,
            -sequence.request.num_output_tokens,
            sequence.order,
        )

    # schedule(): decode

    def _restart_outgrown_sequences(self) -> None:
        """Requeue sequences whose next position lies outside the rope regime of their K/V, once all their tokens are
        known. They go before all of their class and tenant, so they are admitted again as a rule at once."""
        if self.config.rope.longrope_limit is None:
            return  # no regime ends before its sequence
        for sequence in [s for s in self._running if s.is_decoding and s.num_future_tokens < s.max_total_tokens]:
            if sequence.num_future_tokens > sequence.regime_tokens and sequence.num_in_flight_tokens == 0:
                self.stats.num_rope_restarts += 1
                self._suspend(sequence)

    def _make_room_to_decode(self, placed_slots: set[int]) -> tuple[list[_Sequence], list[_Sequence], bool] | None:
        """(the sequences that decode in this step, those of them that take a free page, whether others that could
        decode do not). None: not before the steps in flight are read.

        Free and evictable pages go to those of the least `_keep_rank`. Where they do not suffice, the running sequence
        of the greatest is preempted; if it is the only one that lacks a page it just sits this step out, keeping what
        it has. One whose slot is in `placed_slots` is not preempted. A sequence that needs its last token
        (`Request.needs_last_token`) sits out while that is in flight.
        """
        decoding: list[_Sequence] = []
        lacking: list[_Sequence] = []
        is_one_left_out = False
        for sequence in self._running:  # once a step for each: kept short
            num_future_tokens = sequence.num_future_tokens
            if not sequence.is_decoding or num_future_tokens >= sequence.max_total_tokens:
                continue
            if num_future_tokens > sequence.regime_tokens or (
                sequence.needs_last_token and sequence.num_in_flight_tokens
            ):
                is_one_left_out = True
                continue
            decoding.append(sequence)
            if num_future_tokens > sequence.num_page_tokens:
                lacking.append(sequence)
        while len(lacking) > (num_free_pages := self.page_allocator.num_free_pages):
            victim = max((s for s in self._running if s.slot not in placed_slots), key=self._keep_rank)
            if self._drop_kept_pages(victim.order, any_age=len(self._running) == 1):
                continue
            lacking.sort(key=self._keep_rank)
            if lacking[num_free_pages] is victim:
                decoding.remove(victim)
                return decoding, lacking[:num_free_pages], True
            if self._in_flight:
                # Pages in quarantine may do; and a victim's tokens in flight would be lost.
                return None
            self._preempt(victim, for_whom=lacking[num_free_pages].request, reason="pages")
            for sequences in (decoding, lacking):
                if victim in sequences:
                    sequences.remove(victim)
        return decoding, lacking, is_one_left_out

    def _lacking_for_many(self, decoding: list[_Sequence]) -> list[_Sequence] | None:
        """The sequences of `decoding`, all that there are, that need a page more for max_decode_steps in one dispatch;
        none needs two. None where these do not serve everybody: a sequence needs its last token, none needs them all,
        or pages or rope regimes do not hold out.

        A request that waits for a slot or pages lets at most MAX_IDLE_SHARE of the running sequences' steps pass
        after their ends, by length: so few cost less than a dispatch for each step, and admissions in groups fill
        the prefill buckets. An end by stop token is not foreseen, and may keep a request waiting for the dispatch.
        """
        num_steps = self.config.max_decode_steps
        if num_steps == 1:
            return None
        if self._waiting.num_parked:
            return None  # the step in flight brings what they wait for
        lacking = []
        num_idle, needs_all = 0, False
        for sequence in decoding:  # once a step for each: kept short
            num_future_tokens, max_total_tokens = sequence.num_future_tokens, sequence.max_total_tokens
            num_remaining_tokens = max_total_tokens - num_future_tokens
            if num_remaining_tokens >= num_steps:
                needs_all = True
                end_position = num_future_tokens - 1 + num_steps
            else:
                num_idle += num_steps - num_remaining_tokens
                end_position = max_total_tokens - 1
            if end_position > sequence.regime_tokens or sequence.needs_last_token:
                return None
            if end_position > sequence.num_page_tokens:
                lacking.append(sequence)
        if self._waiting and not self.config.static_batching:
            num_idle += num_steps * (len(self._running) - len(decoding))  # whose last tokens are in flight
            is_useful = num_idle <= MAX_IDLE_SHARE * num_steps * len(self._running)
        else:
            is_useful = needs_all
        return lacking if is_useful and len(lacking) <= self.page_allocator.num_free_pages else None

    def _move_down(self) -> list[SlotMove]:
        """Move sequences out of the slots that only a larger decode program than all of them need reaches."""
        size = self.config.decode_size(len(self._running), 0)
        moves: list[SlotMove] = []
        if size == self.config.max_num_seqs:
            return moves
        for sequence in self._running:
            assert sequence.slot is not None
            if sequence.slot >= size:
                moves.append(SlotMove(source=sequence.slot, target=heapq.heappop(self._free_slots)))
                heapq.heappush(self._free_slots, sequence.slot)
                sequence.slot = moves[-1].target
        self.stats.num_slot_moves += len(moves)
        return moves

    def _append_page(self, sequence: _Sequence) -> PageAppend:
        page_ids = self.page_allocator.try_allocate(1, sequence.request.context.tenant)
        assert page_ids is not None and sequence.slot is not None
        sequence.page_ids += page_ids
        self._count_pages(sequence, len(page_ids))
        return PageAppend(sequence.slot, len(sequence.page_ids) - 1, page_ids[0])

    # schedule(): prefill

    def _prefill(
        self, max_tokens: int, resets: list[SlotReset], chunks: list[PrefillChunk], decoding: list[_Sequence]
    ) -> int:
        """Dispatch chunks of running sequences, and admit; those whose pages come back from the host decode at once.
        Returns the tokens taken, padded, at most `max_tokens`.

        A long prompt leaves all but `long_prefill_tokens` of them to shorter ones, and takes what they leave. Background
        comes after all others, those that are admitted now included.
        """
        config = self.config
        num_taken = 0
        prefilling = [s for s in self._running if not s.is_decoding]
        long_ones = [s for s in prefilling if s.entry.is_long]
        num_reserved = self._num_reserved(long_ones, max_tokens)
        background = []
        for sequence in prefilling:
            if sequence.entry.is_long:
                continue
            if self._is_background(sequence):
                background.append(sequence)
            elif num_taken < max_tokens - num_reserved:
                num_taken += self._add_chunk(sequence, max_tokens - num_reserved - num_taken, chunks)
        is_static = config.static_batching
        may_admit = not (is_static and self._running)
        self._resume_waits()  # a producer may have given way in this very step
        while may_admit and self._has_slot() and (num_taken < max_tokens - num_reserved or is_static):
            entry = self._next_entry(num_long=len(long_ones))
            if entry is None:
                break
            most = max_tokens - num_reserved
            if self._is_background(entry.item):
                most = self._background_tokens(most, num_taken)
                while background and num_taken < most:
                    num_taken += self._add_chunk(background.pop(0), most - num_taken, chunks)
                if num_taken >= most:
                    break
            reset = self._admit(entry.item) if self._is_within_limits(entry.item) else None
            if reset is None:
                break
            resets.append(reset)
            if entry.item.is_decoding:
                decoding.append(entry.item)
            elif entry.is_long:
                long_ones.append(entry.item)
                num_reserved = self._num_reserved(long_ones, max_tokens)
            elif num_taken < most:
                num_taken += self._add_chunk(entry.item, most - num_taken, chunks)
        most = self._background_tokens(max_tokens - num_reserved, num_taken)
        for sequence in background:
            if num_taken < most:
                num_taken += self._add_chunk(sequence, most - num_taken, chunks)
        for index, sequence in enumerate(long_ones, start=1):
            left = max_tokens
            if self._is_background(sequence):
                left = self._background_tokens(max_tokens, num_taken)
            left -= num_taken
            if left > 0:
                most = min(max(left - self._num_reserved(long_ones[index:], max_tokens), config.query_block), left)
                num_taken += self._add_chunk(sequence, most, chunks)
        return num_taken

    def _background_tokens(self, max_tokens: int, num_taken: int) -> int:
        """Tokens that the step may have with background, if others took `num_taken` and it might have `max_tokens`."""
        limits, buckets = self._limits, self.config.prefill_token_buckets
        if limits is None or limits.max_background_prefill_tokens is None:
            return max_tokens
        block = self.config.query_block
        most = max(limits.max_background_prefill_tokens // block * block, buckets[0])
        if num_taken > most:
            most = next(bucket for bucket in buckets if bucket >= num_taken)
        return min(most, max_tokens)

    def _without_background(self, decoding: list[_Sequence], chunks: list[PrefillChunk]) -> list[_Sequence]:
        """Those that decode in the step: where more prompt tokens of others than background may have are in it, background
        sits it out, which is long without it. At most MAX_PAUSE such steps follow each other: it goes on however many
        prompts come."""
        limits = self._limits
        if limits is None or limits.max_background_prefill_tokens is None or self._num_paused == MAX_PAUSE:
            self._num_paused = 0
            return decoding
        num_tokens = sum(
            len(chunk.token_ids) for chunk in chunks if chunk.request.context.priority < limits.background_priority
        )
        if num_tokens <= max(limits.max_background_prefill_tokens, self.config.prefill_token_buckets[0]):
            self._num_paused = 0
            return decoding
        self._num_paused += 1
        return [s for s in decoding if not self._is_background(s) or s.last_step_id == self._next_step_id]

    def _num_reserved(self, long_ones: list[_Sequence], max_tokens: int) -> int:
        """Tokens of a step's budget that long prompts are sure of, whole query blocks; one block is left to others."""
        if not long_ones:
            return 0
        block, long_tokens = self.config.query_block, self.config.policy.long_prefill_tokens
        tokens = sum(min(long_tokens, s.request.num_tokens - s.request.num_computed_tokens) for s in long_ones)
        return min(-(-tokens // block) * block, max(max_tokens - block, 0))

    def _next_entry(self, num_long: int | None = None) -> Entry[_Sequence] | None:
        """Who is to be placed next. `num_long`: long prompts in prefill; None: that is to be counted."""
        policy = self.config.policy
        may_be_long = True
        if policy.long_prefill_tokens:
            if num_long is None:
                num_long = sum(s.entry.is_long for s in [s for s in self._running if not s.is_decoding])
            may_be_long = num_long < policy.max_long_prefills
        is_over = self._is_over_budget if self._budgets.is_used else None
        while (entry := self._waiting.head(may_be_long=may_be_long, is_over=is_over)) is not None:
            if self._awaits_sibling(entry.item):
                self._waiting.park(entry)
                continue
            if self._num_new_prefix_waits == MAX_NEW_PREFIX_WAITS:
                return None
            if not self._had_better_wait(entry.item):
                return entry
            self._num_new_prefix_waits += 1
            self._waiting.park(entry)  # those behind it may go on
        return None

    def _is_over_budget(self, entry: Entry[_Sequence]) -> bool:
        """Whether its tenant would hold more KV than its budget with it."""
        return (
            self._budgets.is_used
            and self._budgets.excess(entry.tenant, self.config.num_pages_for(entry.num_tokens) * self.config.page_size)
            > 0
        )

    def _count_pages(self, sequence: _Sequence, num_more: int) -> None:
        num_tokens = num_more * self.config.page_size
        sequence.num_page_tokens += num_tokens
        if self._budgets.is_used:
            self._budgets.hold(sequence.entry.tenant, num_tokens)

    def _add_chunk(self, sequence: _Sequence, budget: int, chunks: list[PrefillChunk]) -> int:
        """Dispatch as many of the sequence's known tokens as `budget` holds. Returns the tokens taken, padded."""
        request = sequence.request
        assert sequence.slot is not None
        start = request.num_computed_tokens
        stop = min(start + budget, request.num_tokens)
        is_last = stop == request.num_tokens
        samples = is_last and sequence.num_remaining_tokens > 0
        chunks.append(
            PrefillChunk(
                slot=sequence.slot,
                request=request,
                start=start,
                token_ids=sequence.token_ids(start, stop),
                samples=samples,
            )
        )
        request.num_computed_tokens = stop
        sequence.last_step_id = self._next_step_id
        sequence.num_future_tokens += samples
        sequence.is_decoding = is_last
        num_padded_tokens = -(-(stop - start) // self.config.query_block) * self.config.query_block
        self.stats.num_prefill_tokens += stop - start
        self.stats.num_prefill_padding_tokens += num_padded_tokens - (stop - start)
        return num_padded_tokens

    def _admit(self, sequence: _Sequence) -> SlotReset | None:
        """`_try_admit`, for which younger finished requests give back the pages that they keep."""
        reset = self._try_admit(sequence)
        while reset is None and self._drop_kept_pages(sequence.order, any_age=not self._running):
            reset = self._try_admit(sequence)
        return reset

    def _try_admit(self, sequence: _Sequence) -> SlotReset | None:
        """Give a waiting sequence a slot and pages for all its known tokens. None: pages are too few.

        Pages for the running sequences to grow into are left over, so that an admission does not make the next
        step preempt: one each, and twice as many each time this request was preempted. Once that covers all they
        can still need, no older sequence can push it out again, which bounds preemptions by the logarithm of the
        longest sequence's pages. Nor are cached pages taken that are kept for other tenants. With nobody running every
        page is there, so whatever `add` accepted gets in.
        """
        request, copy = sequence.request, sequence.host_copy
        placement = self._placement(sequence)
        match, source, hit_page_ids = placement.match, placement.source, placement.shared_page_ids
        max_growth = 1 << request.num_preemptions
        num_left_pages = self._num_pages_for(request) - placement.num_taken_pages
        if num_left_pages < max_growth * len(self._running) and num_left_pages < sum(
            min(s.max_pages - len(s.page_ids), max_growth) for s in self._running
        ):
            return None
        for page_id in hit_page_ids:
            self.page_allocator.share(page_id)
        new_page_ids = self.page_allocator.try_allocate(placement.num_new_pages, request.context.tenant)
        assert new_page_ids is not None

        for sibling in self._sequences[request.request_id].values():
            sibling.entry.deadline_s = None  # a request that has begun goes on whole
        num_hit_tokens = len(match) * self.config.page_size if source is None else source.num_tokens
        self._waiting.placed(sequence.entry, request.num_tokens - num_hit_tokens)
        bisect.insort(self._running, sequence, key=_run_order)
        self._num_running_of_class[sequence.entry.class_index] += 1
        sequence.account = sequence.entry.class_index, sequence.entry.tenant
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.page_ids = hit_page_ids + new_page_ids
        self._count_pages(sequence, len(sequence.page_ids))
        sequence.num_hit_pages = len(hit_page_ids)
        if sequence.chain is not None:
            sequence.chain.restart(match)
            self._announce_prefix(sequence, sequence.chain, len(hit_page_ids))
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = len(match) * self.config.page_size
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        sequence.num_confirmed_tokens = num_hit_tokens if source is None else source.num_confirmed_tokens
        if copy is not None:
            self._swap_in(sequence, copy)
        elif self._may_read_cache(request) and request.fork_of is None:
            self.stats.num_prefix_query_tokens += request.num_tokens
            self.stats.num_prefix_hit_tokens += num_hit_tokens
        if source is not None:
            self._take_over(sequence, source)
        return SlotReset(
            slot=sequence.slot,
            request=request,
            page_ids=tuple(sequence.page_ids),
            is_decoding=sequence.is_decoding,
        )

    def _swap_in(self, sequence: _Sequence, copy: HostCopy) -> None:
        """Bring back what a sequence had computed, to the pages that follow those it shares."""
        first = sequence.num_hit_pages
        self.host_pool.swap_in(copy, first, sequence.page_ids[first : copy.num_pages])
        sequence.host_copy = None
        sequence.request.num_computed_tokens = sequence.num_confirmed_tokens = copy.num_tokens
        sequence.is_decoding = copy.is_decoding
        sequence.last_step_id = self._next_step_id  # which writes these pages

    def _placement(self, sequence: _Sequence) -> _Placement:
        request, source = sequence.request, None
        if sequence.host_copy is None:
            request.rope_len = self.config.rope.rope_len(request)
            sequence.regime_tokens = self.config.rope.max_tokens(request)
            match = self._match_prefix(sequence)
            source = self._fork_source(sequence)
        else:
            match = sequence.host_copy.live_pages()
        page_ids = [page.page_id for page in match]
        if source is not None and source.num_tokens > len(match) * self.config.page_size:
            page_ids += source.page_ids[len(match) : source.num_tokens // self.config.page_size]
        else:
            source = None
        num_new_pages = self.config.num_pages_for(request.num_tokens) - len(page_ids)
        return _Placement(
            match=match,
            source=source,
            shared_page_ids=page_ids,
            num_new_pages=num_new_pages,
            num_taken_pages=num_new_pages + sum(map(self.page_allocator.is_evictable, page_ids)),
        )

    def _num_pages_for(self, request: Request) -> int:
        """Free and evictable pages that it may take: not those kept for other tenants, unless nobody runs."""
        pages = self.page_allocator
        return pages.num_pages_for(request.context.tenant) if self._running else pages.num_free_pages

    def _may_read_cache(self, request: Request) -> bool:
        # Log-probs of the prompt need the logits of every prompt position: none can be skipped.
        return self.prefix_cache is not None and request.params.prompt_logprobs is None

    def _match_prefix(self, sequence: _Sequence) -> list[CachedPage]:
        request = sequence.request
        if self.prefix_cache is None:
            return []
        salt = self._salt(request)
        if sequence.chain is None or sequence.chain.salt != salt:
            sequence.chain = self.prefix_cache.new_chain(salt, request.context.tenant, request.hashed_prompt)
        if not self._may_read_cache(request):
            return []
        max_pages = (request.num_tokens - 1) // self.config.page_size  # the last token runs: its logits are needed
        self._extend_chain(self.prefix_cache, sequence, sequence.chain, max_pages)
        return self.prefix_cache.match_prefix(sequence.chain, max_pages)

    def _extend_chain(self, cache: PrefixCache, sequence: _Sequence, chain: PageChain, num_full_pages: int) -> None:
        if num_full_pages > len(chain):
            page_size = self.config.page_size
            cache.extend(chain, sequence.token_ids(len(chain) * page_size, num_full_pages * page_size))

    def _salt(self, request: Request) -> bytes:
        return self._salts.salt(request, self.config.rope.salt(request))

    # schedule(): prefixes that running requests are computing

    def _announce_prefix(self, sequence: _Sequence, chain: PageChain, num_hit_pages: int) -> None:
        assert self.prefix_cache is not None
        if self.config.prefix_wait_tokens is not None:
            num_full_pages = sequence.request.num_tokens // self.config.page_size
            self._extend_chain(self.prefix_cache, sequence, chain, num_full_pages)
            if num_full_pages > num_hit_pages:
                self._pending_prefixes.announce(_run_order(sequence), chain, num_hit_pages, num_full_pages)

    def _resume_waits(self) -> None:
        """Those whose prefix has come, or will not come, are to be placed again."""
        for entry in self._waiting.parked:
            sequence = entry.item
            awaited_page = sequence.awaited_page
            if awaited_page is None:
                is_over = not self._awaits_sibling(sequence)
            else:
                is_over = not self._pending_prefixes.is_pending(awaited_page, _run_order(sequence))
            if is_over:
                sequence.awaited_page = None
                self._waiting.unpark(entry, self._now_s)

    def _had_better_wait(self, sequence: _Sequence) -> bool:
        """Whether an older running request is computing enough of what a waiting one would compute first;
        `awaited_page` then names the end of it.

        The older one holds all the pages it needs, so nobody waits in a circle or for long; once it ends or gives way,
        the wait is over.
        """
        wait_tokens, page_size, request = self.config.prefix_wait_tokens, self.config.page_size, sequence.request
        if (
            not self._pending_prefixes
            or wait_tokens is None
            or sequence.host_copy is not None
            or self.config.static_batching
            or not self._may_read_cache(request)
        ):
            return False
        num_hit_pages = len(self._placement(sequence).shared_page_ids)
        assert sequence.chain is not None
        missing = sequence.chain.page_hashes[num_hit_pages : (request.num_tokens - 1) // page_size]
        num_pages = self._pending_prefixes.run_length(missing, _run_order(sequence))
        if num_pages * page_size < wait_tokens:
            return False
        sequence.awaited_page = missing[num_pages - 1]
        self.stats.num_prefix_waits += 1
        return True

    # schedule(): sequences with the same first tokens

    def _siblings(self, sequence: _Sequence) -> Iterator[_Sequence]:
        """Running completions of the same request whose K/V of its prompt are those that this one would compute. None
        where less than a page could be shared: it is no sooner copied than computed."""
        request = sequence.request
        if self.config.static_batching or request.num_prompt_tokens <= self.config.page_size:
            return
        request.rope_len = self.config.rope.rope_len(request)
        salt = self._salt(request)
        for sibling in self._sequences[request.request_id].values():
            if sibling.slot is not None and self._salt(sibling.request) == salt:
                yield sibling

    def _has_prompt(self, sequence: _Sequence) -> bool:
        """Whether steps dispatched before this one compute the whole prompt."""
        request = sequence.request
        return request.num_computed_tokens >= request.num_prompt_tokens and sequence.last_step_id < self._next_step_id

    def _awaits_sibling(self, sequence: _Sequence) -> bool:
        """Whether another completion of its request is about to compute the prompt for all."""
        if sequence.request.fork_of is not None or sequence.host_copy is not None:
            return False
        is_computed_now = False
        for sibling in self._siblings(sequence):
            if self._has_prompt(sibling):
                return False
            is_computed_now = True
        return is_computed_now

    def _fork_source(self, sequence: _Sequence) -> ForkSource | None:
        request = sequence.request
        if request.fork_of is not None:
            kept = self._kept_pages.get(_key(request.fork_of))
            if kept is None or not kept.page_ids or kept.salt != self._salt(request):
                return None
            return ForkSource(page_ids=kept.page_ids, num_tokens=kept.num_tokens, num_confirmed_tokens=kept.num_tokens)
        sibling = next((s for s in self._siblings(sequence) if self._has_prompt(s)), None)
        if sibling is None:
            return None
        num_tokens = min(request.num_prompt_tokens, request.num_tokens - 1)
        return ForkSource(
            page_ids=sibling.page_ids,
            num_tokens=num_tokens,
            num_confirmed_tokens=min(sibling.num_confirmed_tokens, num_tokens),
        )

    def _take_over(self, sequence: _Sequence, source: ForkSource) -> None:
        """Copy what the page after the shared ones holds of the source's tokens."""
        self.stats.num_forks += 1
        sequence.last_step_id = self._next_step_id  # which writes the copy
        index, num_tokens = divmod(source.num_tokens, self.config.page_size)
        if num_tokens:
            copy = PageCopy(source=source.page_ids[index], target=sequence.page_ids[index], num_tokens=num_tokens)
            self._page_copies.append(copy)

    def _drop_kept_pages(self, order: tuple[int, int], *, any_age: bool) -> bool:
        """Give back the pages that the youngest finished request keeps, of those younger than `order` or of all. False:
        there are none. Its forks then compute everything themselves."""
        holders = [kept for kept in self._kept_pages.values() if kept.page_ids and (any_age or kept.order > order)]
        if not holders:
            return False
        kept = max(holders, key=lambda kept: kept.order)
        self.page_allocator.free(kept.page_ids, after_step=kept.last_step_id)
        kept.page_ids = []
        return True

    # schedule(): its two ends

    def _give_way(self) -> None:
        """Nothing can run now: only the update of a step in flight can change that, or a request to come."""
        self.needs_drain = bool(self._in_flight)
        self.stats.num_drains += self.needs_drain
        assert self.needs_drain or not self._sequences, "unfinished requests, nothing in flight, nothing to run"

    def _dispatch(
        self,
        decoding: list[_Sequence],
        num_decode_steps: int,
        chunks: list[PrefillChunk],
        num_padded_tokens: int,
        moves: list[SlotMove],
        resets: list[SlotReset],
        appends: list[PageAppend],
    ) -> Schedule:
        step_id = self._next_step_id
        self._next_step_id += 1
        decode = []
        num_slots = 0  # up to the last that is used
        for sequence in decoding:  # once a step for each: kept short
            slot, request, max_total_tokens = sequence.slot, sequence.request, sequence.max_total_tokens
            assert slot is not None
            sequence.last_step_id = step_id
            # It has the K/V of all tokens but the last, and stops at max_total_tokens.
            num_future_tokens = sequence.num_future_tokens + num_decode_steps
            if num_future_tokens > max_total_tokens:
                num_future_tokens = max_total_tokens
            sequence.num_future_tokens = num_future_tokens
            request.num_computed_tokens = num_future_tokens - 1
            decode.append((slot, request))
            if slot >= num_slots:
                num_slots = slot + 1
        self.stats.num_steps += 1
        swap_outs, swap_ins = self.host_pool.take_step()
        bucket, num_decode_slots = self._program_size(num_slots, chunks, num_padded_tokens)
        if decode:
            self.stats.num_decode_steps += num_decode_steps
        self.stats.num_decode_slot_steps += num_decode_slots * num_decode_steps
        schedule = Schedule(
            step_id=step_id,
            swap_outs=swap_outs,
            zero_pages=tuple(self._zero_pages),
            page_copies=tuple(self._page_copies),
            swap_ins=swap_ins,
            deactivate=tuple(sorted(self._deactivate - {r.slot for r in resets} - {m.target for m in moves})),
            moves=tuple(moves),
            resets=tuple(resets),
            page_appends=tuple(appends),
            decode=tuple(decode),
            num_decode_slots=num_decode_slots,
            num_decode_steps=num_decode_steps,
            prefill=tuple(chunks),
            prefill_bucket=bucket,
            preemptions=tuple(self._preemptions),
        )
        self._preemptions.clear()
        self._zero_pages.clear()
        self._page_copies.clear()
        self._deactivate.clear()
        self._in_flight.append(step_id)
        return schedule

    def _program_size(self, num_slots: int, chunks: list[PrefillChunk], num_padded_tokens: int) -> tuple[int, int]:
        """(prefill bucket, slots that the decode rows run over) of the step's program; 0 for what it has not.

        num_slots: up to the last that decodes.
        """
        config = self.config
        bucket = next(size for size in config.prefill_token_buckets if size >= num_padded_tokens) if chunks else 0
        if not num_slots:
            return bucket, 0
        return bucket, config.decode_size(max([num_slots, *(chunk.slot + 1 for chunk in chunks)]), bucket)

    # update()

    def _take_chunk(self, sequence: _Sequence, chunk: PrefillChunk, token_id: int) -> StepEvent | None:
        if chunk.samples:
            return self._take_tokens(sequence, chunk.slot, [token_id])
        if token_id == NOT_FINITE:
            self._finish_poisoned(sequence)
            return StepEvent(request=sequence.request, slot=chunk.slot, new_token_ids=(), finished=True)
        sequence.num_confirmed_tokens = chunk.start + len(chunk.token_ids)
        self._publish(sequence)
        if sequence.num_confirmed_tokens < sequence.request.max_total_tokens:
            return None
        self._finish(sequence, FinishReason.LENGTH, is_stopped=True)  # only scored: nothing is sampled
        return StepEvent(request=sequence.request, slot=chunk.slot, new_token_ids=(), finished=True)

    def _take_tokens(self, sequence: _Sequence, slot: int, token_ids: list[int]) -> StepEvent:
        """Append what one slot sampled in one step, up to where it stops."""
        request, output = sequence.request, sequence.request.output_token_ids
        num_old_tokens = len(output)
        stop = error_token_id = None
        for token_id in token_ids:
            if token_id < 0:
                error_token_id = token_id
                break
            output.append(token_id)
            stop = stop_after(request)
            if stop is not None:
                break
        new_token_ids = tuple(output[num_old_tokens:])
        if new_token_ids:
            sequence.num_confirmed_tokens = request.num_tokens - 1  # to sample the last, all before it were computed
            self._served[sequence.account] = self._served.get(sequence.account, 0) + len(new_token_ids)
        if error_token_id == NOT_FINITE:
            self._finish_poisoned(sequence)
        else:
            self._publish(sequence)
            if error_token_id is not None:
                error = f"the device stopped after {request.num_output_tokens} tokens, the host would have gone on"
                self._finish(sequence, FinishReason.ERROR, error=error)
            elif stop is not None:
                self._finish(sequence, *stop, is_stopped=True)
        return StepEvent(request=request, slot=slot, new_token_ids=new_token_ids, finished=request.is_finished)

    def _publish(self, sequence: _Sequence) -> None:
        """Offer to the prefix cache the full pages whose tokens are known and whose K/V is confirmed."""
        chain, page_size = sequence.chain, self.config.page_size
        if chain is None or sequence.num_confirmed_tokens < (chain.num_published + 1) * page_size:
            return
        assert self.prefix_cache is not None
        num_full_pages = sequence.num_confirmed_tokens // page_size
        self._extend_chain(self.prefix_cache, sequence, chain, num_full_pages)
        new_pages = self.prefix_cache.publish(chain, sequence.page_ids, num_full_pages)
        self._pending_prefixes.published(_run_order(sequence), num_full_pages)
        if self.pinned_prefixes:
            for page in new_pages:
                self.pinned_prefixes.hold(page)

    # Ends of running

    def _finish_poisoned(self, sequence: _Sequence) -> None:
        """End a request whose logits were not finite. Its pages leave the cache; those nobody else holds are zeroed
        before the next step."""
        if self.pinned_prefixes:
            self.pinned_prefixes.give_back(set(sequence.page_ids[sequence.num_hit_pages :]), sequence.last_step_id)
        own_page_ids = [p for p in sequence.page_ids if self.page_allocator.ref_count(p) == 1]
        self._mark_to_zero(own_page_ids)
        if self.prefix_cache is not None:
            for page_id in (*own_page_ids, *sequence.page_ids[sequence.num_hit_pages :]):
                self.prefix_cache.remove(page_id)
        error = f"the logits after {sequence.request.num_tokens} tokens were not finite (NaN or infinity)"
        self._finish(sequence, FinishReason.ERROR, error=error)

    def _mark_to_zero(self, page_ids: list[int]) -> None:
        self._zero_pages.update(dict.fromkeys(page_ids))

    def _finish(
        self,
        sequence: _Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        error: str | None = None,
        is_stopped: bool = False,
    ) -> None:
        """End a request, waiting or running. is_stopped: the device stopped its slot by itself."""
        if sequence.slot is None:
            self._waiting.remove(sequence.entry)
            if sequence.host_copy is not None:
                self.host_pool.drop(sequence.host_copy)
        else:
            if sequence.request.keeps_pages and reason is FinishReason.LENGTH:
                self._keep_pages(sequence)
            self._release(sequence, is_stopped=is_stopped)
        self._end(sequence, reason, stop_reason, error=error)

    def _end(
        self,
        sequence: _Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """Note the end of a request that neither waits nor runs any more."""
        request = sequence.request
        request.fork_of = None
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error
        if self.ended is not None and not request.keeps_pages:  # a step of a beam says nothing of usual lengths
            self.ended.append(request)
        children = self._sequences[request.request_id]
        del children[request.child_index], self._sequence_of[id(request)]
        del sequence.entry  # the two name each other: the prompt would stay until the garbage collector finds them
        if not children:
            del self._sequences[request.request_id]

    def _keep_pages(self, sequence: _Sequence) -> None:
        request = sequence.request
        self._kept_pages[_key(request)] = KeptPages(
            order=sequence.order,
            salt=self._salt(request),
            num_tokens=request.num_tokens - 1,
            last_step_id=sequence.last_step_id,
            page_ids=sequence.page_ids,
        )
        self._count_pages(sequence, -len(sequence.page_ids))
        sequence.page_ids = []

    def _preempt(self, sequence: _Sequence, *, for_whom: Request, reason: PreemptionReason) -> None:
        """Take the pages of a running sequence. It keeps its output and goes before all of its class and tenant that
        were not placed yet."""
        self.stats.num_preemptions += 1
        sequence.request.num_preemptions += 1
        sequence.host_copy = self._try_swap_out(sequence)
        self._preemptions.append(
            Preemption(
                context=sequence.request.context,
                by=for_whom.context,
                reason=reason,
                num_tokens=0 if sequence.host_copy is not None else sequence.request.num_computed_tokens,
            )
        )
        self._suspend(sequence)

    def _try_swap_out(self, sequence: _Sequence) -> HostCopy | None:
        """Have the K/V of a sequence copied to the host; None: it is to be computed again. What is not confirmed, or
        is about to be restarted for its rope regime, is not copied."""
        num_tokens = sequence.num_confirmed_tokens
        if num_tokens < sequence.request.num_computed_tokens or sequence.num_future_tokens > sequence.regime_tokens:
            return None
        page_ids = sequence.page_ids[: self.config.num_pages_for(num_tokens)]
        return self.host_pool.try_swap_out(page_ids, num_tokens, is_decoding=sequence.is_decoding)

    def _suspend(self, sequence: _Sequence) -> None:
        assert sequence.num_in_flight_tokens == 0, sequence.request.request_id
        self._release(sequence, is_stopped=False)
        request = sequence.request
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._waiting.push(sequence.entry, num_tokens=request.num_tokens, now_s=self._now_s)

    def _release(self, sequence: _Sequence, *, is_stopped: bool) -> None:
        """Give back slot and pages; the pages are quarantined while a step in flight may write them."""
        assert sequence.slot is not None
        self._pending_prefixes.withdraw(_run_order(sequence))
        self.page_allocator.free(sequence.page_ids, after_step=sequence.last_step_id)
        if not is_stopped:
            self._deactivate.add(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        self._running.remove(sequence)
        self._num_running_of_class[sequence.entry.class_index] -= 1
        self._count_pages(sequence, -len(sequence.page_ids))
        sequence.slot = None
        sequence.page_ids = []
        sequence.num_hit_pages = 0
        sequence.is_decoding = False

    # The prefix cache from outside

    def pin_prefix(self, request: Request) -> int:
        """Keep the full pages of a prompt from eviction, from when they are in the cache; returns how many.

        request: says tokens, tenant and salt; it does not run. Raises RequestError where it has no full page, beyond
        `max_pinned_pages`, and without a prefix cache.
        """
        pins, chain = self._pin_chain(request)
        return pins.pin(chain)

    def unpin_prefix(self, request: Request) -> int:
        """Take back `pin_prefix` of the same; returns how many pages it had. Raises RequestError where it is not pinned."""
        pins, chain = self._pin_chain(request)
        return pins.unpin(chain)

    def _pin_chain(self, request: Request) -> tuple[PinnedPrefixes, PageChain]:
        if self.prefix_cache is None or self.pinned_prefixes is None:
            raise RequestError("prompt", "cannot be pinned: enable_prefix_caching is off")
        page_size = self.config.page_size
        if request.num_prompt_tokens < page_size:
            raise RequestError("prompt", f"has {request.num_prompt_tokens} tokens; a page to pin takes {page_size}")
        return self.pinned_prefixes, self._prompt_chain(self.prefix_cache, request)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; returns how many pages were forgotten. What runs goes on, and pins stay."""
        if self.pinned_prefixes is not None:
            self.pinned_prefixes.give_back_all()
        return self.page_allocator.forget_cached_pages()

    # Look-ups and checks

    def _find(self, request: Request) -> _Sequence | None:
        """The sequence of an unfinished request; None once it is finished, even if its id is in use again."""
        return self._sequence_of.get(id(request))

    def _unfinished(self) -> Iterator[_Sequence]:
        for children in self._sequences.values():
            yield from children.values()

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, slots, pages and the prefix cache disagree."""
        config = self.config
        assert not self._page_copies, "pages to copy, and no step that does it"
        holders = [s.page_ids for s in self._running]
        for kept in self._kept_pages.values():
            assert not kept.page_ids or kept.num_tokens <= len(kept.page_ids) * config.page_size
            holders.append(kept.page_ids)
        if self.prefix_cache is not None and self.pinned_prefixes is not None:
            self.prefix_cache.check_integrity()
            self.pinned_prefixes.check_integrity()
            holders.append(self.pinned_prefixes.held_page_ids)
        self.page_allocator.check_integrity(holders)
        self._pending_prefixes.check_integrity(
            {_run_order(s): s.chain.num_published for s in self._running if s.chain is not None}
        )
        assert sorted([*self._free_slots, *(s.slot for s in self._running if s.slot is not None)]) == list(
            range(config.max_num_seqs)
        )
        self._waiting.check_integrity()
        waiting = [entry.item for entry in self._waiting]
        assert list(map(_run_order, self._running)) == sorted({_run_order(s) for s in self._running})
        assert self._num_running_of_class == [
            sum(s.entry.class_index == index for s in self._running) for index in range(len(config.policy.class_names))
        ]
        assert {id(s) for s in self._unfinished()} == {id(s) for s in (*waiting, *self._running)}
        assert {id(s.request): s for s in self._unfinished()} == self._sequence_of
        held: Counter[str] = Counter()
        for sequence in self._running:
            assert sequence.num_page_tokens == len(sequence.page_ids) * config.page_size
            held[sequence.entry.tenant] += sequence.num_page_tokens
        assert not self._budgets.is_used or self._budgets.held == held
        for sequence in waiting:
            request = sequence.request
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request.status
            assert sequence.slot is None and not sequence.page_ids and sequence.num_in_flight_tokens == 0
            assert request.num_computed_tokens == 0
            assert sequence.awaited_page is None or sequence.entry in self._waiting.parked
            copy = sequence.host_copy
            if copy is not None:
                assert copy.num_pages == config.num_pages_for(copy.num_tokens) and copy.num_tokens < request.num_tokens
                assert copy.num_tokens == request.num_tokens - 1 or not copy.is_decoding
                assert request.num_tokens <= sequence.regime_tokens == config.rope.max_tokens(request)
        self.host_pool.check_integrity(s.host_copy for s in waiting if s.host_copy is not None)
        for sequence in self._running:
            request = sequence.request
            num_computed = request.num_computed_tokens
            assert request.status is RequestStatus.RUNNING and sequence.slot is not None
            assert sequence.host_copy is None
            assert 0 <= sequence.num_confirmed_tokens <= num_computed <= len(sequence.page_ids) * config.page_size
            assert num_computed <= sequence.regime_tokens == config.rope.max_tokens(request)
            assert request.num_tokens <= sequence.num_future_tokens <= request.max_total_tokens
            if sequence.is_decoding and request.max_total_tokens > request.num_prompt_tokens:
                assert num_computed == sequence.num_future_tokens - 1
            if not self._in_flight:
                assert sequence.num_in_flight_tokens == 0
