"""Beam search: the pure search, and the run of it as one-token requests that fork each other's pages.

At each step every live beam gives its 2 * width most likely tokens, so that width beams live on even where half of
those end. Scores, ends and their order are those of vLLM's `beam_search`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.request import Request, SamplingParams, TokenLogprob
from serving.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Beam:
    """The output of one beam so far."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens; none where none were asked for
    cumulative_logprob: float = 0.0
    stop_token_id: int | None = None  # the last token, where that ended the beam


class BeamSearch:
    """The search over one prompt's continuations, given the best tokens after each live beam.

    A beam that takes a stop token has ended, whatever its rank among the candidates. The others go on until they have
    `max_output_tokens`, or until no live beam can come to score better than the worst of the `width` best ended.
    """

    def __init__(
        self,
        *,
        width: int,
        num_prompt_tokens: int,
        max_output_tokens: int,
        stop_token_ids: Sequence[int],
        length_penalty: float,
        num_logprobs: int | None = None,
    ):
        self.width = width
        self.live = [Beam()]  # best first
        self.ended: list[Beam] = []  # the `width` best, best first
        self._num_prompt_tokens = num_prompt_tokens
        self._max_output_tokens = max_output_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._length_penalty = length_penalty
        self._num_logprobs = num_logprobs

    def score(self, beam: Beam) -> float:
        """cumulative log-prob / length ** length_penalty; the length is in tokens, the prompt's included (as vLLM
        counts it) and a stop token at the end left out."""
        num_tokens = self._num_prompt_tokens + len(beam.token_ids) - (beam.stop_token_id is not None)
        return self._penalised(beam.cumulative_logprob, num_tokens)

    def _penalised(self, logprob: float, num_tokens: int) -> float:
        return logprob / num_tokens**self._length_penalty

    @property
    def is_done(self) -> bool:
        if not self.live or len(self.live[0].token_ids) >= self._max_output_tokens:
            return True
        if len(self.ended) < self.width:
            return False
        # No log-prob is above 0: what comes of a beam has at most its sum, and a length between those two.
        best = self.live[0]
        lengths = (len(best.token_ids), self._max_output_tokens)
        bound = max(self._penalised(best.cumulative_logprob, self._num_prompt_tokens + n) for n in lengths)
        return self.score(self.ended[-1]) >= bound

    def advance(self, best_tokens: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Take the step: `best_tokens[i]` are the most likely tokens after live beam i, best first, with their
        log-probs. Returns, for each beam now live, which of those before it goes on with."""
        candidates: list[tuple[int, Beam]] = []
        for parent, (beam, tokens) in enumerate(zip(self.live, best_tokens, strict=True)):
            for token_id, logprob in tokens[: 2 * self.width]:
                longer = replace(
                    beam,
                    token_ids=(*beam.token_ids, token_id),
                    logprobs=(*beam.logprobs, *self._entry(token_id, logprob, tokens)),
                    cumulative_logprob=beam.cumulative_logprob + logprob,
                )
                if token_id in self._stop_token_ids:
                    self.ended.append(replace(longer, stop_token_id=token_id))
                else:
                    candidates.append((parent, longer))
        candidates.sort(key=lambda candidate: -self.score(candidate[1]))
        del candidates[self.width :]
        self.ended = self._best_of(self.ended)
        self.live = [beam for _, beam in candidates]
        return [parent for parent, _ in candidates]

    def _entry(self, token_id: int, logprob: float, tokens: Sequence[tuple[int, float]]) -> tuple[TokenLogprob, ...]:
        if self._num_logprobs is None:
            return ()
        return (TokenLogprob(token_id=token_id, logprob=logprob, top=tuple(tokens[: self._num_logprobs])),)

    def _best_of(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -self.score(beam))[: self.width]  # stable: of equals the first

    def best(self) -> list[Beam]:
        """The `width` best so far, ended or not, best first; fewer before the first step."""
        return self._best_of([*self.ended, *self.live])


class BeamRun:
    """A beam search under way in a scheduler: one request of one token for each live beam and step.

    A request keeps its pages when it ends, until the requests of the next step have forked them and ended too.
    """

    def __init__(self, request: Request, width: int):
        """request: the beams are continuations of it, with its limits and stop tokens."""
        params = request.params
        self.search = BeamSearch(
            width=width,
            num_prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_total_tokens - request.num_prompt_tokens,
            stop_token_ids=request.stop_token_ids,
            length_penalty=params.length_penalty,
            num_logprobs=params.logprobs,
        )
        self.num_preemptions = 0
        self._request = request
        self._indices = itertools.count()
        self._params = SamplingParams(temperature=0.0, max_tokens=None, logprobs=max(2 * width, params.logprobs or 0))
        self.first = self._make_request(Beam(), None, replace(self._params, prompt_logprobs=params.prompt_logprobs))
        self._requests = [self.first]  # of the live beams
        self._parents: list[Request] = []  # of the step before; their pages are kept
        self._best_tokens: dict[int, list[tuple[int, float]]] = {}  # by child index

    def _make_request(self, beam: Beam, parent: Request | None, params: SamplingParams) -> Request:
        request = self._request
        return replace(
            request,
            params=params,
            max_total_tokens=request.num_prompt_tokens + len(beam.token_ids) + 1,
            stop_token_ids=(),
            child_index=next(self._indices),
            output_token_ids=list(beam.token_ids),
            keeps_pages=True,
            fork_of=parent,
            last_token_time_s=None if parent is None else parent.last_token_time_s,
        )

    def start(self, scheduler: Scheduler) -> None:
        scheduler.add(self.first)

    def owns(self, request: Request) -> bool:
        """Whether it is the request of a live beam."""
        return any(request is other for other in self._requests)

    def take(self, request: Request, best_tokens: list[tuple[int, float]], now_s: float) -> bool:
        """The most likely tokens after a live beam. True: those after all of them are known."""
        request.last_token_time_s = now_s
        self.num_preemptions += request.num_preemptions
        self._best_tokens[request.child_index] = best_tokens
        return len(self._best_tokens) == len(self._requests)

    def advance(self, scheduler: Scheduler) -> bool:
        """Choose the next beams and queue their requests. False: the search is done, and nothing was queued."""
        parents = self.search.advance([self._best_tokens[request.child_index] for request in self._requests])
        self._best_tokens.clear()
        self._release(scheduler)
        self._parents = self._requests
        if self.search.is_done:
            return False
        self._requests = [
            self._make_request(beam, self._parents[parent], self._params)
            for beam, parent in zip(self.search.live, parents, strict=True)
        ]
        for request in self._requests:
            scheduler.add(request)
        return True

    def end(self, scheduler: Scheduler) -> None:
        """End the requests that have not ended, and give back all pages."""
        scheduler.abort(self._request.request_id)
        self._release(scheduler)
        self._parents = self._requests
        self._release(scheduler)
        self._requests = []

    def _release(self, scheduler: Scheduler) -> None:
        for request in self._parents:
            scheduler.release_pages(request)
