"""State machines that call the allocator, the prefix cache and the scheduler in any order, and check after each call.

Each has a model of its own to compare with, beside the subject's `check_integrity`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serving.request import FinishReason, StructuredOutput
from serving.scheduling.page_allocator import PageAllocator
from serving.scheduling.prefix_cache import CachedPage, PageChain, PrefixCache


def check(machine, *, max_examples: int, num_steps: int) -> None:
    """Run `machine`, a class or a function that makes one, so many times for at most so many calls each."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@dataclass
class Holder:
    """A sequence that holds pages of one token each, and what they hold once computed."""

    page_ids: list[int]
    tokens: list[int]
    chain: PageChain
    last_step: int = 0


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences take, share, publish and free pages while steps are dispatched and completed.

    The model: who holds which page, which step may still write it, and what a cached page holds.
    """

    @initialize(num_pages=st.integers(5, 12))
    def start(self, num_pages):
        self.cache = PrefixCache(page_size=1)
        self.allocator = PageAllocator(num_pages, self.cache)
        self.holders: list[Holder] = []
        self.written_until: dict[int, int] = {}  # page -> the last step that may write it, once nobody holds it
        self.content: dict[int, tuple[int, ...]] = {}  # page -> tokens up to and with its own, as it was published
        self.published: dict[tuple[int, ...], None] = {}  # every content there ever was, in order
        self.num_dispatched = self.num_completed = 0
        self.next_token = 0

    def fresh_tokens(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def take(self, num_pages):
        """Allocate and check what was given."""
        num_free = self.allocator.num_free_pages
        page_ids = self.allocator.try_allocate(num_pages)
        assert (page_ids is None) == (num_pages > num_free)
        for page_id in page_ids or ():
            assert self.written_until.get(page_id, 0) <= self.num_completed, "a step in flight writes it"
            assert all(page_id not in holder.page_ids for holder in self.holders)
            self.content.pop(page_id, None)
        return page_ids

    @rule(num_pages=st.integers(0, 4))
    def admit(self, num_pages):
        page_ids = self.take(num_pages)
        if page_ids is not None:
            tokens = self.fresh_tokens(num_pages)
            chain = self.cache.new_chain(b"")
            self.cache.extend(chain, tokens)
            self.holders.append(Holder(page_ids, tokens, chain))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        page_ids = self.take(1)
        if page_ids is not None:
            holder.page_ids += page_ids
            tokens = self.fresh_tokens(1)
            holder.tokens += tokens
            self.cache.extend(holder.chain, tokens)

    @precondition(lambda self: self.holders and self.num_dispatched < self.num_completed + 3)
    @rule()
    def dispatch(self):
        """A step that writes the pages of every sequence."""
        self.num_dispatched += 1
        for holder in self.holders:
            holder.last_step = self.num_dispatched

    @precondition(lambda self: self.num_completed < self.num_dispatched)
    @rule()
    def complete(self):
        self.num_completed += 1
        self.allocator.step_completed(self.num_completed)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        num_pages = len(holder.page_ids) - data.draw(st.integers(0, len(holder.page_ids)))
        before = holder.chain.num_published
        self.cache.publish(holder.chain, holder.page_ids, num_pages)
        for index in range(before, num_pages):
            if holder.page_ids[index] in self.cache:
                self.content[holder.page_ids[index]] = tuple(holder.tokens[: index + 1])
                self.published[tuple(holder.tokens[: index + 1])] = None

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def hit(self, data):
        """A sequence that begins as one that was published, however long ago, shares what the cache finds."""
        tokens = list(data.draw(st.sampled_from(list(self.published))))
        chain = self.cache.new_chain(b"")
        self.cache.extend(chain, tokens)
        match = self.cache.match_prefix(chain, len(tokens))
        num_free = self.allocator.num_free_pages
        num_evictable = sum(self.allocator.is_evictable(page.page_id) for page in match)
        for index, page in enumerate(match):
            assert self.content[page.page_id] == tuple(tokens[: index + 1])
            self.allocator.share(page.page_id)
        assert self.allocator.num_free_pages == num_free - num_evictable
        if match:
            chain.restart(match)
            self.holders.append(Holder([page.page_id for page in match], tokens[: len(match)], chain))
            del chain.page_hashes[len(match) :], chain.page_tokens[len(match) :]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        holder = self.holders.pop(index)
        self.allocator.free(holder.page_ids, after_step=holder.last_step)
        for page_id in holder.page_ids:
            self.written_until[page_id] = holder.last_step

    @rule()
    def forget(self):
        num_cached = len(self.cache)
        assert self.allocator.forget_cached_pages() == num_cached
        self.content.clear()
        assert len(self.cache) == 0 and self.allocator.num_evictable_pages == 0

    @invariant()
    def agrees(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity([holder.page_ids for holder in self.holders])
        self.cache.check_integrity()
        held = {page_id for holder in self.holders for page_id in holder.page_ids}
        assert self.allocator.num_held_pages == len(held)
        assert len(self.cache) == len(self.content) and all(page_id in self.cache for page_id in self.content)
        quarantined = {p for p, step in self.written_until.items() if step > self.num_completed} - held
        assert self.allocator.num_quarantined_pages == len(quarantined)


@dataclass
class Node:
    """A page that the model's cache holds."""

    page_id: int
    content: tuple[bytes, tuple[int, ...]]  # salt, tokens up to and with the page's own
    parent: Node | None
    is_live: bool = True


@dataclass
class Sequence:
    chain: PageChain
    salt: bytes
    tokens: list[int]
    page_ids: list[int] = field(default_factory=list)
    tail: Node | None = None
    is_open: bool = True  # pages after it can be reached
    num_published: int = 0


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet look up, publish and lose pages. With honest hashes the cache must find exactly
    what the model does; with hashes of one bit, it must never find what holds something else."""

    @initialize(page_size=st.integers(1, 3), has_collisions=st.booleans())
    def start(self, page_size, has_collisions):
        self.page_size, self.has_collisions = page_size, has_collisions
        if has_collisions:
            self.cache = PrefixCache(page_size, hash_fn=lambda data: bytes([sum(data) % 2]))
        else:
            self.cache = PrefixCache(page_size)
        self.nodes: dict[tuple[bytes, tuple[int, ...]], Node] = {}
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # of every page given out so far
        self.sequences: list[Sequence] = []
        self.num_pages = 0

    def model_match(self, salt, tokens) -> list[Node]:
        match: list[Node] = []
        for stop in range(self.page_size, len(tokens) + 1, self.page_size):
            node = self.nodes.get((salt, tuple(tokens[:stop])))
            if node is None or node.parent is not (match[-1] if match else None):
                break
            match.append(node)
        return match

    @rule(salt=st.sampled_from([b"", b"b"]), pages=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def look_up(self, salt, pages):
        tokens = [token for page in pages for token in [page] * self.page_size]
        chain = self.cache.new_chain(salt)
        self.cache.extend(chain, tokens)
        match: list[CachedPage] = self.cache.match_prefix(chain, len(pages))
        for index, page in enumerate(match):
            assert page.is_live and self.content[page.page_id] == (salt, tuple(tokens[: (index + 1) * self.page_size]))
        expected = self.model_match(salt, tokens)
        if not self.has_collisions:
            assert [page.page_id for page in match] == [node.page_id for node in expected]
        chain.restart(match)
        sequence = Sequence(chain, salt, tokens, [page.page_id for page in match], num_published=len(match))
        if match and not self.has_collisions:
            sequence.tail = expected[-1]
        for index in range(len(match), len(pages)):
            self.num_pages += 1
            sequence.page_ids.append(self.num_pages)
            self.content[self.num_pages] = salt, tuple(tokens[: (index + 1) * self.page_size])
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        num_pages = len(sequence.page_ids) - data.draw(st.integers(0, len(sequence.page_ids)))
        self.cache.publish(sequence.chain, sequence.page_ids, num_pages)
        while sequence.num_published < num_pages:
            sequence.num_published += 1
            self.model_publish(sequence, sequence.num_published)

    def model_publish(self, sequence: Sequence, num_pages: int) -> None:
        if sequence.tail is not None and not sequence.tail.is_live:
            sequence.is_open = False
        if not sequence.is_open:
            return
        content = sequence.salt, tuple(sequence.tokens[: num_pages * self.page_size])
        node = self.nodes.get(content)
        if node is None:
            node = Node(sequence.page_ids[num_pages - 1], content, sequence.tail)
            self.nodes[content] = node
        if node.parent is sequence.tail:
            sequence.tail = node
        else:
            sequence.is_open = False

    @rule(data=st.data())
    def remove(self, data):
        page_id = data.draw(st.integers(1, max(self.num_pages, 1)))
        self.cache.remove(page_id)
        assert page_id not in self.cache
        for content, node in list(self.nodes.items()):
            if node.page_id == page_id:
                node.is_live = False
                del self.nodes[content]

    @rule()
    def clear(self):
        num_cached = len(self.cache)
        assert self.cache.clear() == num_cached and len(self.cache) == 0
        for node in self.nodes.values():
            node.is_live = False
        self.nodes.clear()

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        if not self.has_collisions:
            assert len(self.cache) == len(self.nodes)
            assert all(node.page_id in self.cache for node in self.nodes.values())


def scheduler_machine(tools):
    """A machine over the engine and device of tests/serving/scheduling/conftest.py, which know what each page must
    hold; at the end every request has the output that it has alone."""

    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(
            page_size=st.sampled_from([1, 4, 16]),
            num_spare_pages=st.sampled_from([0, 1, 8, 40]),
            decode_sizes=st.sets(st.integers(1, 6), min_size=1, max_size=3),
            query_block=st.sampled_from([1, 4]),
            num_blocks=st.integers(1, 6),
            max_decode_steps=st.sampled_from([1, 4]),
            enable_prefix_caching=st.booleans(),
            depth=st.sampled_from([0, 1, 1, 2]),
        )
        def start(
            self, page_size, num_spare_pages, decode_sizes, query_block, num_blocks, max_decode_steps, depth, **more
        ):
            self.engine = tools.Engine(
                tools.make_config(
                    page_size=page_size,
                    num_pages=-(-MAX_MODEL_LEN // page_size) + 1 + num_spare_pages,
                    decode_sizes=tuple(sorted(decode_sizes)),
                    max_model_len=MAX_MODEL_LEN,
                    query_block=query_block,
                    prefill_token_buckets=(query_block * num_blocks,),
                    max_decode_steps=min(max_decode_steps, page_size),
                    **more,
                ),
                depth=depth,
            )
            self.num_requests = 0

        @rule(
            prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
            max_tokens=st.integers(1, MAX_MODEL_LEN),
            salt=st.sampled_from([b"", b"", b"tenant"]),
            num_children=st.sampled_from([1, 1, 1, 2]),
            stop_token_ids=st.sampled_from([(), (), (1, 2, 3)]),
            is_structured=st.sampled_from([False, False, True]),
            is_scored=st.sampled_from([False, False, False, True]),
        )
        def add(self, prompt, max_tokens, salt, num_children, stop_token_ids, is_structured, is_scored):
            params = {"stop_token_ids": stop_token_ids}
            if is_structured:
                params["structured"] = StructuredOutput.json_object()
            if is_scored:
                params["prompt_logprobs"] = 0
            for child in range(num_children):
                self.engine.add(
                    tools.make_request(
                        f"r{self.num_requests}",
                        prompt,
                        max_tokens,
                        max_model_len=MAX_MODEL_LEN,
                        child_index=child,
                        cache_salt=salt,
                        seed=self.num_requests,
                        **params,
                    )
                )
            self.num_requests += 1

        @rule(num_steps=st.integers(1, 4))
        def step(self, num_steps):
            for _ in range(num_steps):
                self.engine.step()

        @precondition(lambda self: self.engine.in_flight)
        @rule()
        def read(self):
            self.engine.update()

        @precondition(lambda self: self.num_requests)
        @rule(data=st.data())
        def abort(self, data):
            for request in self.engine.scheduler.abort(f"r{data.draw(self.indices())}"):
                assert request.finish_reason is FinishReason.ABORT

        @precondition(lambda self: self.num_requests)
        @rule(data=st.data(), num_tokens=st.integers(0, 6))
        def poison(self, data, num_tokens):
            self.engine.runner.poison_after.setdefault((f"r{data.draw(self.indices())}", 0), num_tokens)

        @rule()
        def forget(self):
            self.engine.scheduler.page_allocator.forget_cached_pages()

        def indices(self):
            return st.integers(0, self.num_requests - 1)

        @invariant()
        def agrees(self):
            if hasattr(self, "engine"):
                self.engine.scheduler.check_integrity()

        def teardown(self):
            if hasattr(self, "engine"):
                self.engine.run()
                self.engine.check_outputs()

    return SchedulerMachine


MAX_MODEL_LEN = 32
