"""Requests that take over pages of others with the same first tokens: completions of one prompt, and forks of ended
requests that keep their pages."""

from __future__ import annotations

import random

import pytest

from serving.request import FinishReason, Request
from serving.scheduling.config import RopeRegime


class Beams:
    """A group of one-token requests, forked anew at each round with tokens at random, as a beam search does."""

    def __init__(self, tools, rng: random.Random, engine, request_id: str, prompt: list[int], width: int, rounds: int):
        self.tools, self.rng, self.engine = tools, rng, engine
        self.request_id, self.prompt, self.width, self.rounds = request_id, prompt, width, rounds
        self.num_made = 0
        self.live: list[Request] = []
        self.kept: list[Request] = []
        self.add(None, [])

    def add(self, parent: Request | None, output: list[int]) -> Request:
        config = self.engine.config
        request = self.tools.make_request(
            self.request_id, self.prompt, child_index=self.num_made, max_model_len=config.max_model_len, temperature=0.0
        )
        request.max_total_tokens = len(self.prompt) + len(output) + 1
        request.output_token_ids += output
        request.keeps_pages, request.fork_of = True, parent
        self.num_made += 1
        self.engine.add(request)
        self.live.append(request)
        return request

    def step(self) -> bool:
        """False: the group has ended."""
        if not self.live:
            return False
        scheduler = self.engine.scheduler
        if any(request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) for request in self.live):
            self.end()
        elif all(request.is_finished for request in self.live):
            for request in self.kept:
                scheduler.release_pages(request)
            self.kept, self.live = self.live, []
            self.rounds -= 1
            if self.rounds == 0 or self.kept[0].max_total_tokens == self.engine.config.max_model_len:
                self.end()
            else:
                for _ in range(self.width):
                    parent = self.rng.choice(self.kept)
                    self.add(parent, [*parent.output_token_ids[:-1], self.rng.randrange(self.tools.VOCAB_SIZE)])
            scheduler.check_integrity()
        return bool(self.live)

    def end(self) -> None:
        self.engine.scheduler.abort(self.request_id)
        for request in (*self.kept, *self.live):
            self.engine.scheduler.release_pages(request)
        self.kept, self.live = [], []
        self.engine.scheduler.check_integrity()


@pytest.mark.parametrize("rope", [RopeRegime(), RopeRegime(longrope_limit=30), RopeRegime(dynamic_limit=20)], ids=repr)
@pytest.mark.parametrize("trial", range(4))
def test_forks_in_random_company_read_what_they_would_have_written(tools, rng, trial, rope):
    """A pool of one to three longest sequences: kept pages are dropped, forks and completions preempted; the device
    compares every page that is read, and the integrity check every count at each step."""
    page_size = rng.choice([1, 4, 16])
    max_model_len = 64
    min_pages = (max_model_len - 1) // page_size + 2
    config = tools.make_config(
        page_size=page_size,
        num_pages=min_pages + rng.choice([0, 2, min_pages, 2 * min_pages]),
        decode_sizes=(rng.randint(1, 8),),
        max_model_len=max_model_len,
        query_block=4,
        prefill_token_buckets=(rng.choice([4, 16, 32]),),
        max_decode_steps=1 if page_size == 1 else 4,
        enable_prefix_caching=rng.random() < 0.5,
        rope=rope,
    )
    engine = tools.Engine(config, depth=rng.choice([0, 1, 1, 2]))
    print(config, "depth", engine.depth)
    groups: list[Beams] = []
    for index in range(30):
        prompt = tools.random_prompt(rng, rng.randint(1, 50))
        if index % 2:
            groups.append(Beams(tools, rng, engine, f"b{index}", prompt, rng.randint(1, 4), rng.randint(1, 8)))
        else:
            for child in range(rng.choice([1, 3, 8])):
                request = tools.make_request(
                    f"r{index}", prompt, rng.randint(1, 40), child_index=child, max_model_len=max_model_len
                )
                if rng.random() < 0.05:
                    engine.runner.poison_after[(request.request_id, child)] = rng.randint(0, 5)
                engine.add(request)
        for _ in range(rng.randint(0, 12)):
            engine.step()
            for group in groups:
                group.step()
        if rng.random() < 0.1:
            engine.scheduler.abort(f"r{rng.randrange(index + 1)}")
            if groups:
                rng.choice(groups).end()
    while engine.step() or any([group.step() for group in groups]):
        for group in groups:
            group.step()
    engine.check_idle()
    for key in [key for key in engine.requests if key[0].startswith("b")]:
        del engine.requests[key]
    engine.check_outputs()


def held_pages(engine) -> int:
    return engine.scheduler.page_allocator.num_held_pages


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 18, 32, 33, 40])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_share_the_full_pages_of_their_prompt_and_compute_its_last_token(tools, num_tokens, prefix_caching):
    config = tools.make_config(
        page_size=16, query_block=4, prefill_token_buckets=(64,), enable_prefix_caching=prefix_caching
    )
    engine = tools.Engine(config)
    for child in range(3):
        engine.add(tools.make_request("r", range(num_tokens), max_tokens=4, child_index=child))
    engine.step()
    num_shared = (num_tokens - 1) // 16
    if num_shared == 0:  # there is no full page to share: all compute at once
        assert [len(chunk.token_ids) for chunk in engine.schedules[0].prefill] == [num_tokens] * 3
    else:
        assert [len(chunk.token_ids) for chunk in engine.schedules[0].prefill] == [num_tokens]
        engine.step()
        assert [(chunk.start, len(chunk.token_ids)) for chunk in engine.schedules[1].prefill] == [
            (num_tokens - 1, 1)
        ] * 2
        num_copied = (num_tokens - 1) % 16
        assert [copy.num_tokens for copy in engine.schedules[1].page_copies] == [num_copied] * 2 * bool(num_copied)
        assert held_pages(engine) <= num_shared + 2 * 3  # of each a last page of the prompt and one to grow into
        assert engine.scheduler.stats.num_forks == 2
    engine.run()
    engine.check_outputs()


def test_a_completion_does_not_wait_for_others_once_the_first_has_gone(tools):
    config = tools.make_config(page_size=4, query_block=4, prefill_token_buckets=(8,), enable_prefix_caching=False)
    engine = tools.Engine(config)
    requests = [engine.add(tools.make_request("r", range(40), max_tokens=4, child_index=child)) for child in range(3)]
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.scheduler.finish(requests[0], FinishReason.STOP, "enough")
    engine.run()
    assert [request.finish_reason for request in requests] == [FinishReason.STOP] + [FinishReason.LENGTH] * 2
    assert engine.scheduler.stats.num_forks == 1  # the second computed the prompt, for the third too


def test_others_are_not_held_up_by_completions_that_wait_for_their_prompt(tools):
    config = tools.make_config(page_size=4, query_block=4, prefill_token_buckets=(8,))
    engine = tools.Engine(config)
    for child in range(2):
        engine.add(tools.make_request("r", range(42), max_tokens=4, child_index=child))
    other = engine.add(tools.make_request("other", range(3), max_tokens=1))
    while not other.is_finished:
        engine.step()
    # In the step of the prompt's last chunk, when the second completion could not be admitted yet.
    assert [chunk.request.request_id for chunk in engine.schedules[5].prefill] == ["r", "other"]
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("rounds", [1, 6])
def test_forks_of_kept_pages_hold_little_more_than_one_sequence(tools, rng, rounds):
    config = tools.make_config(page_size=4, num_pages=100, prefill_token_buckets=(128,), enable_prefix_caching=False)
    engine = tools.Engine(config)
    beams = Beams(tools, rng, engine, "b", tools.random_prompt(rng, 101), 4, rounds)
    most = 0
    while engine.step() or beams.step():
        beams.step()
        most = max(most, held_pages(engine))
    engine.check_idle()
    assert most <= 25 + 2 * 2 * 4  # of each parent and fork at most two pages of its own, against 4 * 27 unshared
    assert engine.scheduler.stats.num_prefill_tokens == 101 + 4 * (rounds - 1)


def test_released_pages_are_free_at_once_and_forks_that_wait_compute_everything(tools, rng):
    config = tools.make_config(page_size=4, num_pages=100, enable_prefix_caching=False)
    engine = tools.Engine(config)
    beams = Beams(tools, rng, engine, "b", tools.random_prompt(rng, 9), 2, 9)
    while not beams.live[0].is_finished:
        engine.step()
    assert held_pages(engine) == 3
    (root,) = beams.live
    beams.step()
    engine.scheduler.release_pages(root)
    engine.scheduler.release_pages(root)
    assert held_pages(engine) == 0
    engine.step()
    assert [chunk.start for chunk in engine.schedules[-1].prefill] == [0, 0]
    while engine.step() or beams.step():
        beams.step()
    engine.check_idle()
