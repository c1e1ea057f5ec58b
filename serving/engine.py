"""Engine.step(): schedule, dispatch, and read the step before. Knows requests and text, not networks or threads."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.source import ModelSource, open_source
from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig
from configs.model import ModelConfig
from configs.run import RunConfig
from configs.scheduling import SchedulingConfig
from layers.params import param_specs
from serving.beam_search import Beam, BeamRun
from serving.bench.figures import model_cost
from serving.execution.memory import device_memory_bytes
from serving.execution.model_runner import CompileGuard, ModelRunner, PendingStep, StepResult
from serving.execution.program_plan import context_length
from serving.execution.slot_table import MAX_EOS_IDS
from serving.execution.step_clock import StepClock
from serving.observer import EngineObserver, request_record, step_record
from serving.planning.roofline import RooflineStepTime, hardware_peaks
from serving.request import (
    DEFAULT_TENANT,
    CompletionOutput,
    FinishReason,
    Request,
    RequestContext,
    RequestError,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    TokenLogprob,
)
from serving.scheduling.admission import AdmissionControl
from serving.scheduling.config import RopeRegime, SchedulerConfig
from serving.scheduling.eviction import RecomputeCost
from serving.scheduling.online_step_time import OnlineStepTime
from serving.scheduling.prefix_cache import HashedPrompt
from serving.scheduling.schedule import Schedule, StepLimits
from serving.scheduling.scheduler import NOT_FINITE, Scheduler, StepEvent
from serving.scheduling.slo_controller import SloController
from serving.scheduling.step_time import StepWork
from serving.structured.compiler import GrammarCompiler
from serving.structured.constraint import Constraint, Grammar
from serving.text.base import TokenizerError
from serving.text.chat_template import ChatTemplate
from serving.text.detokenizer import IncrementalDetokenizer
from serving.text.generation_config import default_fields, eos_token_ids
from serving.text.template_renderer import RenderLimits
from serving.text.tokenizer import Tokenizer, load_tokenizer
from serving.validation import (
    check_params,
    check_prompt_ids,
    check_request_id,
    check_text_length,
    check_tokens_left,
    max_total_tokens,
)
from sharding.mesh import make_mesh
from sharding.placement import check_split, named_sharding

Prompt = str | Sequence[int]
Progress = Callable[[str, int, int, str], None]  # stage, done, in all, unit or item

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OutputDelta:
    """What one step added to one completion of a request."""

    request_id: str
    index: int
    new_token_ids: tuple[int, ...]
    new_text: str
    new_logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    request_finished: bool  # this was the last of the request's completions


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """What `Engine.check` found right, for `Engine.add_checked`. A prompt that was text keeps it in `text`."""

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    stop_token_ids: tuple[int, ...]
    grammar: Grammar | None
    cache_salt: bytes = b""
    hashed_prompt: HashedPrompt | None = None  # as `Request` has it


@dataclass
class _Completion:
    request: Request
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    constraint: Constraint | None


@dataclass
class _Group:
    """A client's request and its `n` completions."""

    request_id: str
    prompt: str | None
    completions: list[_Completion]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_unfinished: int = 0
    beams: BeamRun | None = None  # its requests run in the place of the completions' own

    @property
    def requests(self) -> list[Request]:
        return [completion.request for completion in self.completions]

    def owns(self, request: Request) -> bool:
        if self.beams is not None:
            return self.beams.owns(request)
        return any(completion.request is request for completion in self.completions)

    def times(self) -> dict[str, float | None]:
        """Of the engine's clock: the earliest of its completions' first moments, the latest of their last ones."""
        requests = self.requests
        first_scheduled = [r.first_scheduled_time_s for r in requests if r.first_scheduled_time_s is not None]
        first_token = [r.first_token_time_s for r in requests if r.first_token_time_s is not None]
        last_token = [r.last_token_time_s for r in requests if r.last_token_time_s is not None]
        finish = [r.finish_time_s for r in requests if r.finish_time_s is not None]
        return {
            "arrival_time_s": requests[0].arrival_time_s,
            "first_scheduled_time_s": min(first_scheduled, default=None),
            "first_token_time_s": min(first_token, default=None),
            "last_token_time_s": max(last_token, default=None),
            "finish_time_s": max(finish) if self.num_unfinished == 0 else None,
        }


@dataclass
class EngineCounters:
    """Totals since start; tokens and requests."""

    num_requests: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: {str(reason): 0 for reason in FinishReason})
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_decode_dispatches: int = 0
    num_prefill_dispatches: int = 0
    num_mixed_dispatches: int = 0
    page_token_steps: int = 0  # tokens that held pages could hold, summed over steps
    unused_page_token_steps: int = 0  # of those, tokens that they did not hold: the waste of paging
    max_unused_tokens_per_sequence: float = 0.0  # the worst step's mean over running sequences


class Engine:
    """One model on one mesh. One thread calls `add`, `abort` and `step`.

    `now` is the clock of every time that the engine reports, in seconds. `observers` are told of steps and requests.
    Raises ConfigError, CheckpointError at construction and RequestError from `add`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        mesh: jax.sharding.Mesh,
        params: dict[str, jax.Array],
        tokenizer: Tokenizer | None,
        *,
        device_bytes: int,
        scheduling: SchedulingConfig | None = None,
        generation_config: dict | None = None,
        render_limits: RenderLimits | None = None,
        progress: Progress | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self._render_limits = render_limits
        self.now = now
        self.observers: tuple[EngineObserver, ...] = ()
        self.model_config, self.config, self.tokenizer = model_config, config, tokenizer
        self.scheduling = scheduling or SchedulingConfig()
        self.generation_config = generation_config or {}
        self.max_model_len = context_length(model_config, config)
        self.eos_token_ids = eos_token_ids(
            self.generation_config,
            {"eos_token_id": model_config.eos_token_ids},
            tokenizer_eos_token_ids=tokenizer.eos_token_ids if tokenizer else (),
            vocab_size=model_config.vocab_size,
        )
        if len(self.eos_token_ids) > MAX_EOS_IDS:
            raise ConfigError(f"eos_token_ids has {len(self.eos_token_ids)} entries; at most {MAX_EOS_IDS} are handled")
        self._check_defaults()
        self.runner = ModelRunner(
            model_config,
            config,
            mesh,
            params,
            max_model_len=self.max_model_len,
            device_bytes=device_bytes,
            cache_dir=compilation_cache_folder(config),
        )
        self.runner.warm_up(
            None
            if progress is None
            else lambda name, done, total, s: progress("compile", done, total, f"{name} {s:.1f} s")
        )
        self.scheduler = self._make_scheduler(static_batching=False)
        self.admission = AdmissionControl(self.scheduling) if self.scheduling.controls_admission else None
        self.controller = self._make_controller()
        self._compiles_before_serving = CompileGuard.count()
        self.counters = EngineCounters()
        self.clock = StepClock(now)
        self._groups: dict[str, _Group] = {}
        self._pending: PendingStep | None = None
        self._last_read_time_s = 0.0
        self._failure: BaseException | None = None  # what ended a step halfway: the device's state is lost with it
        self._ids = (f"request-{number}" for number in itertools.count())
        self._seeds = np.random.default_rng(config.seed)
        self._grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            self._grammars = GrammarCompiler(tokenizer, model_config.vocab_size, self.eos_token_ids)
        self._num_constrained = 0  # unfinished completions that follow a grammar
        self._chat_template: ChatTemplate | None = None  # made when first needed
        self._chat_lock = threading.Lock()

    def _check_defaults(self) -> None:
        """A model whose own defaults no request could run with is refused at start. Raises ConfigError."""
        fields = default_fields(self.generation_config, max_model_len=self.max_model_len)
        params = SamplingParams(**{"max_tokens": None, **fields})
        try:
            self._check_params(params)
            max_total_tokens(1, params, self.max_model_len)
        except RequestError as error:
            raise ConfigError(f"generation_config.json: {error}") from error

    def _make_scheduler(self, *, static_batching: bool) -> Scheduler:
        config, rope, cost = self.config, self.model_config.rope, model_cost(self)
        return Scheduler(
            SchedulerConfig(
                page_size=config.page_size,
                num_pages=self.runner.num_pages,
                decode_sizes=config.decode_sizes,
                max_model_len=self.max_model_len,
                prefill_token_buckets=config.prefill_token_buckets,
                query_block=config.query_block,
                max_decode_steps=config.max_decode_steps,
                enable_prefix_caching=config.enable_prefix_caching,
                prefix_cache_scope=config.prefix_cache_scope or "shared",
                prefix_cache_floor=config.prefix_cache_floor,
                prefix_wait_tokens=config.prefix_wait_tokens,
                max_pinned_pages=config.max_pinned_pages,
                recompute_cost=RecomputeCost(
                    token=2.0 * cost.layer_params,
                    pair=cost.attention_flops(sum(window is None for window in cost.windows)),
                ),
                rope=RopeRegime(
                    longrope_limit=rope.original_max_position_embeddings if rope.rope_type == "longrope" else None,
                    dynamic_limit=rope.max_position_embeddings if rope.rope_type == "dynamic" else None,
                ),
                policy=self.scheduling,
                swap=self.runner.swap_config(),
                static_batching=static_batching,
            )
        )

    def _make_controller(self) -> SloController | None:
        if not self.scheduling.controls_steps and self.admission is None:
            return None
        mesh = self.runner.mesh
        peaks = hardware_peaks(mesh.devices.flat[0].device_kind)
        prior = RooflineStepTime(cost=model_cost(self), peaks=peaks, num_devices=mesh.size)
        return SloController(self.scheduler, self.scheduling, OnlineStepTime(prior, self.config.prefill_token_buckets))

    def restart_scheduler(self, *, static_batching: bool) -> None:
        """Begin again with an empty page pool and prefix cache and new counters; for benchmarks. Needs an idle engine.

        static_batching: admit only into an empty engine, the baseline that continuous batching is compared with.
        """
        assert not self.has_work() and not self._groups
        self.scheduler = self._make_scheduler(static_batching=static_batching)
        self.controller = None if static_batching else self._make_controller()
        self.counters = EngineCounters()

    # Requests

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
    ) -> str:
        """Queue a request; returns its id. Raises RequestError, and then nothing has changed."""
        return self.add_checked(self.check(prompt, params), request_id, context=context)

    def check(self, prompt: Prompt, params: SamplingParams, *, cache_salt: bytes = b"") -> CheckedRequest:
        """Check a request, encode its text and compile its grammar; changes nothing. Raises RequestError. Any thread may
        call it, an event loop's only for token ids without `SamplingParams.structured`: the rest may take seconds.

        Requests of different `cache_salt` share nothing through the prefix cache.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", f"must be SamplingParams, got {type(params).__name__}")
        stop_token_ids = self._check_params(params)
        text = prompt if isinstance(prompt, str) else None
        token_ids = check_prompt_ids(
            prompt if text is None else self.encode(text), self.model_config.vocab_size, self.max_model_len
        )
        limit = max_total_tokens(len(token_ids), params, self.max_model_len)
        self.scheduler.check_room(len(token_ids), limit)
        return CheckedRequest(
            text=text,
            token_ids=token_ids,
            params=params,
            max_total_tokens=limit,
            stop_token_ids=stop_token_ids,
            grammar=self._compile_grammar(params, stop_token_ids),
            cache_salt=cache_salt,
            hashed_prompt=self._hash_prompt(token_ids, cache_salt),
        )

    def _hash_prompt(self, token_ids: tuple[int, ...], cache_salt: bytes) -> HashedPrompt | None:
        if self.scheduler.config.prefix_cache_scope == "tenant":
            return None  # hashes are salted by the tenant, who is not known yet
        return self.scheduler.hash_prompt(self._prompt_request(token_ids, DEFAULT_TENANT, cache_salt))

    def load_structured(self) -> None:
        """Load what the first request with `SamplingParams.structured` would: for a server, before it serves.

        Raises RequestError where that is not installed or the model has no tokenizer.
        """
        if self._grammars is None:
            raise RequestError("structured", "needs a tokenizer, and this model has none")
        self._grammars.load()

    def _compile_grammar(self, params: SamplingParams, stop_token_ids: tuple[int, ...]) -> Grammar | None:
        if params.structured is None:
            return None
        assert self._grammars is not None  # without a tokenizer it was refused
        grammar = self._grammars.compile(params.structured)
        first = Constraint(grammar, params, stop_token_ids)
        if first.error is not None or first.is_complete:
            raise RequestError("structured", first.error or "leaves no token to sample but an end of sequence")
        return grammar

    def _check_params(self, params: SamplingParams) -> tuple[int, ...]:
        """Check settings against model and engine; returns the ids that stop the request."""
        check_params(
            params,
            self.model_config,
            max_logprobs=self.config.max_logprobs,
            has_tokenizer=self.tokenizer is not None,
        )
        stop_ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self.eos_token_ids)
        check_tokens_left(params, stop_ids, self.model_config.vocab_size)
        return tuple(dict.fromkeys(stop_ids))

    def add_checked(
        self, checked: CheckedRequest, request_id: str | None = None, *, context: RequestContext | None = None
    ) -> str:
        """Queue what `check` returned; returns its id, a new one if None. Raises RequestError for an id in use."""
        self._check_alive()
        if request_id is None:
            request_id = next(name for name in self._ids if name not in self._groups)
        else:
            request_id = check_request_id(request_id)
            if request_id in self._groups:
                raise RequestError("request_id", f"{request_id[:80]!r} is in use by a request that has not finished")
        params, token_ids = checked.params, checked.token_ids
        seed = params.seed % 2**64 if params.seed is not None else int(self._seeds.integers(2**64, dtype=np.uint64))
        now_s = self.now()
        completions = [
            _Completion(
                Request(
                    request_id=request_id,
                    prompt_token_ids=token_ids,
                    params=params,
                    max_total_tokens=checked.max_total_tokens,
                    stop_token_ids=checked.stop_token_ids,
                    child_index=index,
                    seed=seed,
                    arrival_time_s=now_s,
                    cache_salt=checked.cache_salt,
                    hashed_prompt=checked.hashed_prompt,
                    context=context or RequestContext(),
                ),
                CompletionOutput(
                    index=index,
                    text="",
                    token_ids=[],
                    logprobs=None if params.logprobs is None else [],
                    cumulative_logprob=None if params.logprobs is None else 0.0,
                ),
                self._detokenizer(params),
                None if checked.grammar is None else Constraint(checked.grammar, params, checked.stop_token_ids),
            )
            for index in range(params.n)
        ]
        prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None] * len(token_ids)
        group = _Group(request_id, checked.text, completions, prompt_logprobs, num_unfinished=params.n)
        if params.use_beam_search:
            group.beams = BeamRun(completions[0].request, params.n)
            group.beams.start(self.scheduler)
        else:
            for completion in completions:
                self.scheduler.add(completion.request)
        self._groups[request_id] = group
        if checked.grammar is not None:
            self._num_constrained += params.n
        self.counters.num_requests += 1
        self.counters.num_prompt_tokens += len(token_ids)
        return request_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw text prompt, with the model's BOS where it has one. Raises RequestError.

        The text of control tokens counts as those tokens: a raw prompt is whole in its sender's hands, and may
        spell out a chat template (a message inside a chat may not, see `serving.text.chat_template`).
        """
        if self.tokenizer is None:
            raise RequestError("prompt", "is text, and this model has no tokenizer: give prompt_token_ids")
        check_text_length(text, self.max_model_len)
        try:
            token_ids = self.tokenizer.encode(text, add_special_tokens=True, allow_special_text=True)
        except TokenizerError as error:
            raise RequestError("prompt", f"cannot be encoded: {error}") from error
        if not token_ids:
            raise RequestError("prompt", f"{text[:80]!r} is empty once encoded, and this tokenizer adds no BOS")
        return token_ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template. Raises RequestError. Any thread may call it.

        template_args: those of `ChatTemplate.render`, such as tools.
        """
        with self._chat_lock:
            if self._chat_template is None:
                if self.tokenizer is None or self.tokenizer.chat_template is None:
                    raise RequestError("messages", "need a chat template, and this model has none")
                self._chat_template = ChatTemplate(self.tokenizer, limits=self._render_limits)
        return self._chat_template.render_ids(messages, **template_args)

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request at once, whatever its stage. Unknown or finished ids are ignored."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        if group.beams is not None:
            return self._finish_beams(group, FinishReason.ABORT, None, self.now())
        return [delta for request in self.scheduler.abort(request_id) for delta in self._end_deltas(request)]

    def output(self, request_id: str) -> RequestOutput:
        """A request as it stands. KeyError for an unknown or already collected id."""
        group = self._groups[request_id]
        first = group.completions[0].request
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=group.prompt_logprobs,
            outputs=[completion.output for completion in group.completions],
            finished=group.num_unfinished == 0,
            num_cached_tokens=first.num_cached_tokens,
            metrics={**group.times(), "num_preemptions": sum(r.num_preemptions for r in group.requests)},
        )

    def collect(self, request_id: str) -> RequestOutput:
        """A finished request's output; the engine forgets the request."""
        output = self.output(request_id)
        assert output.finished, request_id
        del self._groups[request_id]
        return output

    def discard(self, request_id: str) -> None:
        """End a request, if it has not ended, and forget it. Unknown ids are ignored."""
        self.abort(request_id)
        self._groups.pop(request_id, None)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; returns how many pages were forgotten. What runs goes on, and pins stay."""
        return self.scheduler.reset_prefix_cache()

    def pin_prefix(self, prompt: Prompt, *, tenant: str = DEFAULT_TENANT, cache_salt: bytes = b"") -> int:
        """Keep the cached pages of a prompt, such as a system prompt, until `unpin_prefix`; returns how many they are.

        Pages that are not cached yet are kept once a request of this tenant and salt has computed them. A last page that
        the prompt does not fill is not among them. Raises RequestError, also beyond `EngineConfig.max_pinned_pages`.
        """
        return self.scheduler.pin_prefix(self._pin_request(prompt, tenant, cache_salt))

    def unpin_prefix(self, prompt: Prompt, *, tenant: str = DEFAULT_TENANT, cache_salt: bytes = b"") -> int:
        """Take back `pin_prefix` of the same; returns how many pages it kept. Raises RequestError where it is not pinned."""
        return self.scheduler.unpin_prefix(self._pin_request(prompt, tenant, cache_salt))

    def _pin_request(self, prompt: Prompt, tenant: str, cache_salt: bytes) -> Request:
        self._check_alive()
        token_ids = check_prompt_ids(
            self.encode(prompt) if isinstance(prompt, str) else prompt, self.model_config.vocab_size, self.max_model_len
        )
        return self._prompt_request(token_ids, tenant, cache_salt)

    def _prompt_request(self, token_ids: tuple[int, ...], tenant: str, cache_salt: bytes) -> Request:
        """What the scheduler is asked about a prompt with; it does not run."""
        return Request(
            request_id="prompt",
            prompt_token_ids=token_ids,
            params=SamplingParams(),
            max_total_tokens=self.max_model_len,
            context=RequestContext(tenant=tenant),
            cache_salt=cache_salt,
        )

    # Steps

    def has_work(self) -> bool:
        return self._failure is None and (self._pending is not None or self.scheduler.has_work())

    @property
    def is_alive(self) -> bool:
        """False once a step has ended halfway."""
        return self._failure is None

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine has stopped: a step ended halfway") from self._failure

    def step(self) -> list[OutputDelta]:
        """Dispatch the next step, then read the one before; returns what that one produced.

        Whatever ends a step halfway (a fault of the device, an interrupt) ends the engine: pages and slots were
        donated to a program that may not have run. Later calls raise RuntimeError.
        """
        self._check_alive()
        self._notify("step_begun")
        try:
            return self._step()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._notify("step_ended")

    def _notify(self, event: str, *args: Any) -> None:
        """Tell the observers. A fault in one of them costs what it watches for, not the requests."""
        for observer in self.observers:
            try:
                getattr(observer, event)(*args)
            except Exception:
                logger.exception("an observer has failed and is taken off the engine")
                self.observers = tuple(other for other in self.observers if other is not observer)

    def _step(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        self.clock.begin_step()
        limits = self._step_limits()
        schedule = self.scheduler.schedule(self.now(), limits)
        if schedule is None and self._pending is not None:
            # Nothing can be decided before the tokens in flight are known (or nothing is left to do).
            deltas += self._read_pending()
            schedule = self.scheduler.schedule(self.now(), limits)
        for request in self.scheduler.take_expired():
            deltas += self._end_deltas(request)
        pending = None
        if schedule is not None:
            self.clock.look()
            work = None if self.controller is None else StepWork.of(schedule)
            dispatch_time_s = self.now()
            for reset in schedule.resets:
                if reset.request.first_scheduled_time_s is None:
                    reset.request.first_scheduled_time_s = dispatch_time_s
            pending = self.runner.dispatch(schedule, self._masks(schedule))
            pending.dispatch_time_s = dispatch_time_s
            pending.work = work
            self.clock.dispatched(pending.output.tokens)
            self._count_pages()
            if not schedule.prefill:
                self.counters.num_decode_dispatches += 1
            elif schedule.decode:
                self.counters.num_mixed_dispatches += 1
            else:
                self.counters.num_prefill_dispatches += 1
        deltas += self._read_pending()
        self._pending = pending
        self.clock.end_step(is_outstanding=pending is not None)
        return deltas

    def _end_deltas(self, request: Request) -> list[OutputDelta]:
        """Of a request that the scheduler has ended between steps."""
        group = self._groups[request.request_id]
        if group.beams is not None:
            return self._finish_beams(group, request.finish_reason, request.error, self.now())
        return [self._finish_delta(group, group.completions[request.child_index], (), "", None, self.now())]

    def _step_limits(self) -> StepLimits | None:
        """Once a step: the controller counts steps by it."""
        if self.controller is None:
            return None
        now_s = self.now()
        limits = self.controller.limits(now_s)
        if self.admission is not None:
            self.admission.publish(self.controller.snapshot(now_s))
        return limits if self.scheduling.controls_steps else None

    def wait(self) -> None:
        """Wait until the device has run what was dispatched; for benchmarks."""
        if self._pending is not None:
            self.clock.wait(self._pending.output.tokens)

    def _constraint(self, request: Request) -> Constraint | None:
        group = self._groups[request.request_id]
        return None if group.beams is not None else group.completions[request.child_index].constraint

    def _masks(self, schedule: Schedule) -> list[tuple[int, np.ndarray]]:
        """(slot, mask) of each slot that samples under a constraint in this step."""
        if not self._num_constrained:
            return []
        sampling = [*schedule.decode, *((chunk.slot, chunk.request) for chunk in schedule.prefill if chunk.samples)]
        constraints = [(slot, self._constraint(request)) for slot, request in sampling]
        return [(slot, constraint.mask) for slot, constraint in constraints if constraint is not None]

    def _advance_constraints(self, events: list[StepEvent]) -> None:
        """Follow the new tokens, and find what may come next: the device runs the next step meanwhile."""
        assert self._grammars is not None
        unfinished = []
        for event in events:
            constraint = self._constraint(event.request)
            if constraint is None or not event.new_token_ids or event.request.finish_reason is FinishReason.STOP:
                continue
            for token_id in event.new_token_ids:
                constraint.accept(token_id)
            if not event.request.is_finished:
                unfinished.append(constraint)
        self._grammars.find_masks(unfinished)
        for constraint in unfinished:
            if constraint.error is not None:
                self._grammars.forget(constraint.grammar)

    def _count_pages(self) -> None:
        scheduler, counters = self.scheduler, self.counters
        unused = scheduler.num_unused_page_tokens
        counters.page_token_steps += scheduler.page_allocator.num_held_pages * self.config.page_size
        counters.unused_page_token_steps += unused
        counters.max_unused_tokens_per_sequence = max(
            counters.max_unused_tokens_per_sequence, unused / max(scheduler.num_running, 1)
        )

    def _read_pending(self) -> list[OutputDelta]:
        if self._pending is None:
            return []
        self.clock.wait(self._pending.output.tokens)
        result = self._pending.read()
        read_time_s = self.now()
        started_time_s = max(self._pending.dispatch_time_s, self._last_read_time_s)
        self._last_read_time_s = read_time_s
        if self.controller is not None and self._pending.work is not None:
            self.controller.observe(self._pending.work, read_time_s - started_time_s)
        self._pending = None
        tokens = result.tokens
        not_finite = self._record_prompt_logprobs(result)
        if not_finite:
            tokens = tokens.copy()
            for chunk in result.schedule.prefill:
                if not chunk.samples and any(chunk.request is request for request in not_finite):
                    tokens[0, chunk.slot] = NOT_FINITE  # a chunk that samples says so itself
        events = self.scheduler.update(result.schedule, tokens)
        if self.observers:
            record = step_record(result.schedule, events, read_time_s=read_time_s, started_time_s=started_time_s)
            self._notify("step_read", record)
        if self._num_constrained:
            self._advance_constraints(events)
        deltas: list[OutputDelta] = []
        for event in events:
            group = self._groups[event.request.request_id]
            if group.beams is None:
                deltas.append(self._advance(event, result, read_time_s))
            elif group.beams.owns(event.request):  # and the search has not ended with an event before
                deltas += self._advance_beams(group, group.beams, event, result, read_time_s)
        return deltas

    def _record_prompt_logprobs(self, result: StepResult) -> list[Request]:
        """Keep the step's prompt log-probs; returns the requests whose values were not finite."""
        not_finite = []
        for scores in result.scores:
            group = self._groups.get(scores.request.request_id)
            # The id may be in use again: what matters is the request itself.
            if group is None or group.prompt_logprobs is None or not group.owns(scores.request):
                continue
            num_top = scores.request.params.prompt_logprobs or 0
            chosen, top_ids, top_logprobs = (np.asarray(array) for array in scores.arrays)
            if not np.isfinite(chosen[: scores.num_tokens]).all():
                not_finite.append(scores.request)
                continue
            for i in range(scores.num_tokens):
                position = scores.position + i
                if group.prompt_logprobs[position] is not None:
                    continue  # computed again after a preemption or a rope restart: the first values stand
                group.prompt_logprobs[position] = _token_logprob(
                    scores.request.prompt_token_ids[position], chosen[i], top_ids[i], top_logprobs[i], num_top
                )
        return not_finite

    def _advance(self, event: StepEvent, result: StepResult, now_s: float) -> OutputDelta:
        request = event.request
        group = self._groups[request.request_id]
        completion = group.completions[request.child_index]
        output, params = completion.output, request.params
        text, new_ids, new_logprobs = "", [], []
        for k, token_id in enumerate(event.new_token_ids):
            new_ids.append(token_id)
            if params.logprobs is not None:
                assert result.logprobs is not None
                chosen, top_ids, top_logprobs = (array[k, event.slot] for array in result.logprobs)
                new_logprobs.append(_token_logprob(token_id, chosen, top_ids, top_logprobs, params.logprobs))
            if completion.detokenizer is not None:
                text += completion.detokenizer.add(token_id)
                if completion.detokenizer.stopped is not None:
                    self._stop_at_string(request, completion, len(output.token_ids) + len(new_ids))
                    break
        if completion.constraint is not None and (completion.detokenizer is None or not completion.detokenizer.stopped):
            self._stop_at_constraint(request, completion.constraint)
        output.token_ids += new_ids
        if new_ids:
            request.last_token_time_s = now_s
            if request.first_token_time_s is None:
                request.first_token_time_s = now_s
        if output.logprobs is not None:
            output.logprobs += new_logprobs
            output.cumulative_logprob = sum(entry.logprob for entry in output.logprobs)
        self.counters.num_output_tokens += len(new_ids)
        logprobs = tuple(new_logprobs) if params.logprobs is not None else None
        if request.is_finished:
            return self._finish_delta(group, completion, tuple(new_ids), text, logprobs, now_s)
        output.text += text
        return OutputDelta(
            request_id=group.request_id,
            index=output.index,
            new_token_ids=tuple(new_ids),
            new_text=text,
            new_logprobs=logprobs,
            finish_reason=None,
            request_finished=False,
        )

    def _advance_beams(
        self, group: _Group, beams: BeamRun, event: StepEvent, result: StepResult, now_s: float
    ) -> list[OutputDelta]:
        """Note the best tokens after a beam; after the last of them, choose the next beams or end the search."""
        request = event.request
        if request.finish_reason is not FinishReason.LENGTH:
            assert request.finish_reason is not None, request.request_id
            return self._finish_beams(group, request.finish_reason, request.error, now_s)
        assert result.logprobs is not None
        _, top_ids, top_logprobs = (array[0, event.slot] for array in result.logprobs)
        best_tokens = [(int(i), float(logprob)) for i, logprob in zip(top_ids, top_logprobs, strict=True)]
        if not beams.take(request, best_tokens, now_s) or beams.advance(self.scheduler):
            return []
        return self._finish_beams(group, None, None, now_s)

    def _finish_beams(
        self, group: _Group, reason: FinishReason | None, error: str | None, now_s: float
    ) -> list[OutputDelta]:
        """End a search with the best beams that it has; reason None: it is done, and each beam has its own."""
        beams = group.beams
        if beams is None or group.num_unfinished == 0:
            return []
        beams.end(self.scheduler)
        best = beams.search.best()
        best += [Beam()] * (len(group.completions) - len(best))
        first = group.completions[0].request
        first.num_cached_tokens, first.num_preemptions = beams.first.num_cached_tokens, beams.num_preemptions
        deltas = []
        for completion, beam in zip(group.completions, best, strict=True):
            request, output = completion.request, completion.output
            request.status = RequestStatus.FINISHED
            request.output_token_ids = list(beam.token_ids)
            request.first_scheduled_time_s = beams.first.first_scheduled_time_s
            if beam.token_ids:
                request.first_token_time_s, request.last_token_time_s = beams.first.last_token_time_s, now_s
            request.error, request.stop_reason = error, beam.stop_token_id
            request.finish_reason = reason or (FinishReason.LENGTH if beam.stop_token_id is None else FinishReason.STOP)
            output.token_ids = list(beam.token_ids)
            output.cumulative_logprob = beam.cumulative_logprob
            if output.logprobs is not None:
                output.logprobs += beam.logprobs
            self.counters.num_output_tokens += len(beam.token_ids)
            detokenizer = completion.detokenizer
            text = "" if detokenizer is None else "".join(map(detokenizer.add, beam.token_ids))
            logprobs = None if output.logprobs is None else beam.logprobs
            deltas.append(self._finish_delta(group, completion, beam.token_ids, text, logprobs, now_s))
        return deltas

    def _stop_at_string(self, request: Request, completion: _Completion, num_output_tokens: int) -> None:
        """A stop string was completed by output number `num_output_tokens`; later tokens of the step are dropped."""
        assert completion.detokenizer is not None
        stopped = completion.detokenizer.stopped
        if not self.scheduler.finish(request, FinishReason.STOP, stopped):
            # The same step went on to another end; the string came first.
            request.finish_reason, request.stop_reason, request.error = FinishReason.STOP, stopped, None
        del request.output_token_ids[num_output_tokens:]

    def _stop_at_constraint(self, request: Request, constraint: Constraint) -> None:
        if constraint.error is not None:
            self.scheduler.finish(request, FinishReason.ERROR, error=constraint.error)
        elif constraint.is_complete:
            self.scheduler.finish(request, FinishReason.STOP)
            if request.finish_reason is FinishReason.LENGTH:
                # The last token that the limit lets through was also the last that could be.
                request.finish_reason = FinishReason.STOP

    def _finish_delta(
        self,
        group: _Group,
        completion: _Completion,
        new_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprob, ...] | None,
        now_s: float,
    ) -> OutputDelta:
        request, output = completion.request, completion.output
        request.finish_time_s = now_s
        if completion.detokenizer is not None:
            text += completion.detokenizer.finish()
        output.text += text
        output.finish_reason, output.stop_reason, output.error = (
            request.finish_reason,
            request.stop_reason,
            request.error,
        )
        group.num_unfinished -= 1
        self._num_constrained -= completion.constraint is not None
        self.counters.num_finished[str(request.finish_reason)] += 1
        if output.index == 0:  # prompt tokens are counted once a request as well
            self.counters.num_cached_tokens += request.num_cached_tokens
        if group.num_unfinished == 0 and self.observers:
            self._notify("request_finished", request_record(group.requests))
        return OutputDelta(
            request_id=group.request_id,
            index=output.index,
            new_token_ids=new_ids,
            new_text=text,
            new_logprobs=logprobs,
            finish_reason=request.finish_reason,
            request_finished=group.num_unfinished == 0,
        )

    def stats(self) -> dict[str, int | float]:
        """Counters since start and gauges of now; any thread may read them, while a step runs they may be a step apart.

        Now: num_running and num_waiting completions (each of a request's `n` counts), num_free_slots, num_free_pages
        (cached ones that may be evicted included) of num_pages, kv_token_bytes on one device, kv_used_fraction of
        the pages but the null page.

        Since start: num_requests as they were added, num_finished_REASON completions; num_prompt_tokens and, of
        those of finished requests, num_cached_tokens (not computed: a prefix hit), once a request;
        num_output_tokens; num_prefill_tokens as computed, again after a preemption; num_prefill_padding_tokens beside
        them; num_decode_steps, forward passes in which slots decode, and num_decode_slot_steps, slots of the
        programs summed over these; num_preemptions, sequences put back for lack of pages or for more urgent ones; of
        those, num_swap_outs that went to host memory, num_swap_ins that came back, swap_out_bytes and swap_in_bytes
        of all devices' pages (swap_host_bytes, now: what they take); num_deadline_drops, completions that had no slot
        by their deadline; num_page_evictions from the prefix cache; num_prefix_waits, times that a request waited for
        a prefix which another one was computing; page_waste_fraction of the tokens that held pages could hold, over steps;
        max_unused_tokens_per_sequence, the worst step's mean; num_decode_, num_prefill_ and num_mixed_dispatches;
        num_compiles_while_serving; host_s and device_wait_s, seconds of scheduling and dispatching and of waiting
        for results; device_idle_fraction_min and _max, bounds on the share of time without a step to run.
        """
        scheduler, counters = self.scheduler, self.counters
        held = scheduler.page_allocator.num_held_pages
        times = self.clock.times()
        idle_min, idle_max = times.idle_fractions()
        return {
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_free_slots": self.config.max_num_seqs - scheduler.num_running,
            "num_free_pages": scheduler.page_allocator.num_free_pages,
            "num_pages": self.runner.num_pages,
            "kv_token_bytes": round(self.runner.ledger.kv_token_bytes, 2),
            "kv_used_fraction": round(held / (self.runner.num_pages - 1), 4),
            "num_requests": counters.num_requests,
            **{f"num_finished_{reason}": count for reason, count in counters.num_finished.items()},
            "num_prompt_tokens": counters.num_prompt_tokens,
            "num_cached_tokens": counters.num_cached_tokens,
            "num_output_tokens": counters.num_output_tokens,
            "num_prefill_tokens": scheduler.stats.num_prefill_tokens,
            "num_prefill_padding_tokens": scheduler.stats.num_prefill_padding_tokens,
            "num_decode_steps": scheduler.stats.num_decode_steps,
            "num_decode_slot_steps": scheduler.stats.num_decode_slot_steps,
            "num_preemptions": scheduler.stats.num_preemptions,
            "num_deadline_drops": scheduler.stats.num_deadline_drops,
            "num_swap_outs": scheduler.host_pool.num_swap_outs,
            "num_swap_ins": scheduler.host_pool.num_swap_ins,
            "swap_out_bytes": scheduler.host_pool.num_out_bytes,
            "swap_in_bytes": scheduler.host_pool.num_in_bytes,
            "swap_host_bytes": scheduler.host_pool.num_used_bytes,
            "num_page_evictions": scheduler.page_allocator.num_evictions,
            "num_prefix_waits": scheduler.stats.num_prefix_waits,
            "page_waste_fraction": round(counters.unused_page_token_steps / max(counters.page_token_steps, 1), 4),
            "max_unused_tokens_per_sequence": round(counters.max_unused_tokens_per_sequence, 2),
            "num_decode_dispatches": counters.num_decode_dispatches,
            "num_prefill_dispatches": counters.num_prefill_dispatches,
            "num_mixed_dispatches": counters.num_mixed_dispatches,
            "num_compiles_while_serving": self.num_compiles_while_serving,
            "host_s": round(times.host, 3),
            "device_wait_s": round(times.wait, 3),
            "device_idle_fraction_min": round(idle_min, 4),
            "device_idle_fraction_max": round(idle_max, 4),
        }

    @property
    def num_compiles_while_serving(self) -> int:
        """Backend compilations since warm-up; anything but 0 is a fault."""
        return CompileGuard.count() - self._compiles_before_serving


def _token_logprob(token_id: int, chosen, top_ids, top_logprobs, num_top: int) -> TokenLogprob:
    top = tuple((int(i), float(lp)) for i, lp in zip(top_ids[:num_top], top_logprobs[:num_top], strict=True))
    return TokenLogprob(token_id=int(token_id), logprob=float(chosen), top=top)


def build_engine(
    source: str | os.PathLike[str] | ModelSource,
    config: EngineConfig,
    mesh_config: MeshConfig,
    *,
    scheduling: SchedulingConfig | None = None,
    progress: Progress | None = None,
    render_limits: RenderLimits | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Engine:
    """Open a model, lay it out on the mesh, compile everything, and return an engine that is ready to serve.

    now: the clock of every time that the engine reports, in seconds.
    Raises ConfigError or CheckpointError where it cannot be served.
    """
    if not isinstance(source, ModelSource):
        source = open_source(RunConfig(model=str(source) if isinstance(source, os.PathLike) else source).model_source)
    enable_compilation_cache(config)
    model_config = source.model_config
    check_split(model_config, mesh_config.tensor)
    mesh = make_mesh(mesh_config)
    device_bytes = device_memory_bytes(mesh.devices.flat[0], mesh.size)
    tokenizer = load_tokenizer(source.tokenizer_files())
    specs = param_specs(model_config, jnp.dtype(config.dtype), mesh_config.tensor)
    params = source.load_params(
        specs,
        {path: named_sharding(mesh, spec) for path, spec in specs.items()},
        mesh_config.tensor,
        None if progress is None else lambda done, total: progress("load", done, total, "bytes"),
    )
    return Engine(
        model_config,
        config,
        mesh,
        params,
        tokenizer,
        device_bytes=device_bytes,
        scheduling=scheduling,
        generation_config=source.generation_config,
        render_limits=render_limits,
        progress=progress,
        now=now,
    )


def compilation_cache_folder(config: EngineConfig) -> Path | None:
    """Where compiled programs are kept; None: nowhere."""
    if config.compilation_cache_dir == "":
        return None
    if config.compilation_cache_dir is not None:
        return Path(config.compilation_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "compiled"


def enable_compilation_cache(config: EngineConfig) -> None:
    """Keep compiled programs on disk, so that a second start does not compile. Readable by the owner only.

    Raises ConfigError for a folder that cannot be made.
    """
    folder = compilation_cache_folder(config)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, ValueError) as error:  # ValueError: a NUL or half of a surrogate pair in the name
        raise ConfigError(f"compilation_cache_dir={str(folder)!r} cannot be used: {error}") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
