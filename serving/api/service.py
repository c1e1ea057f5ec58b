"""Service: one engine behind every door. Says whether requests are taken, prepares calls, and runs them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from configs.checks import ConfigError
from configs.hf import ARCHITECTURES
from configs.server import ServerConfig
from serving.api.chat_text import OutputFormats, check_formats, prompt_end
from serving.api.constrained_chat import chat_constraint
from serving.api.errors import GivenUpError, NotFoundError, OverloadedError, UnavailableError, UnknownModelError
from serving.api.keys import ApiKeys
from serving.api.loop_delay import LoopDelay
from serving.api.output_constraint import constrained, error_of_request
from serving.api.responses import Answer, ChatAnswer, CompletionAnswer
from serving.api.schema import (
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    TemplateArgs,
    TokenizeCall,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from serving.api.token_text import prompt_text, shown_token
from serving.request import NotNowError, RequestContext, RequestError, RequestOutput, shown
from serving.scheduling.admission import Decision
from serving.scheduling.tenants import RateLimits
from serving.status import status_snapshot
from serving.text.base import TokenizerError
from serving.text.generation_config import default_fields
from serving.validation import check_text_length

if TYPE_CHECKING:  # JAX takes seconds to import, and a server is to say at once that it is alive
    from serving.async_engine import AsyncEngine, RequestDelta
    from serving.engine import CheckedRequest
    from serving.metrics import EngineMetrics
    from serving.operations.operations import Operations

SMALL_PROMPTS = 1024  # characters and tokens of a call, encoded in the event loop; more in a thread, which costs a hop
NUM_GRAMMAR_THREADS = 4  # that wait for a grammar to be compiled
NUM_TEXT_THREADS = 4  # that decode, check and encode
NUM_TEMPLATE_THREADS = 4  # that wait for a chat template: a slow one holds up no request without


class Service:
    """Takes requests from all doors; belongs to one event loop.

    It is loading until `attach`, and takes no new requests after `drain`. `source` is the model source, which names
    the model where the config does not. Raises ConfigError.
    """

    def __init__(self, config: ServerConfig, source: str):
        check_formats(config)
        self.config = config
        self.source = source
        self.model_name = config.served_model_name or source
        self.created_s = int(time.time())
        self.keys = ApiKeys(config.api_keys, config.api_key_tenants)
        self.num_in_flight = 0
        self._loop_delay = LoopDelay(lambda: self.num_in_flight > 0)
        self._engine: AsyncEngine | None = None
        self._operations: Operations | None = None
        self._rate_limits: RateLimits | None = None  # known with the engine
        self._early_refusals: Counter[str] = Counter()  # by reason, while the engine loads
        self._defaults: dict[str, Any] = {}
        self._formats = OutputFormats()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._text_pool = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="headrace-text")
        self._grammar_pool = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, thread_name_prefix="headrace-grammar")
        self._template_pool = ThreadPoolExecutor(NUM_TEMPLATE_THREADS, thread_name_prefix="headrace-template")

    def attach(self, engine: AsyncEngine, operations: Operations | None = None) -> None:
        """Requests are taken from now on. `operations`: what watches the engine; without it there are no metrics.

        Raises ConfigError where tenants would share cached prefixes without the engine's config saying so.
        """
        inner = engine.engine
        if self.config.has_tenants and inner.config.enable_prefix_caching and inner.config.prefix_cache_scope is None:
            raise ConfigError("EngineConfig.prefix_cache_scope is None: a server that tells tenants apart must set it")
        model_type = ARCHITECTURES[inner.model_config.architecture].model_type
        self._formats = OutputFormats.of_model(self.config, inner.tokenizer, model_type, inner.eos_token_ids)
        self._defaults = default_fields(inner.generation_config, max_model_len=inner.max_model_len)
        self._rate_limits = RateLimits(inner.scheduling)
        self._engine, self._operations = engine, operations
        if operations is not None:
            for reason in self._early_refusals.elements():
                operations.metrics.count_refusal(reason)
            self._early_refusals.clear()

    def drain(self) -> None:
        """No new requests are taken from now on; those in flight go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Until no request is in flight."""
        await self._idle.wait()

    def close(self) -> None:
        self._text_pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
        self._template_pool.shutdown(wait=False, cancel_futures=True)

    # State

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken. Any thread may ask."""
        try:
            self.check_ready()
        except UnavailableError:
            return False
        return True

    def check_ready(self) -> None:
        """Raise UnavailableError unless new requests are taken."""
        if self._is_draining:
            raise UnavailableError("the server is draining", retry_after_s=self.config.retry_after_s)
        _ = self.engine
        self._check_not_stuck()

    @property
    def is_dead(self) -> bool:
        return self._engine is not None and not self._engine.is_alive and not self._is_draining

    def check_alive(self) -> None:
        """Raise UnavailableError where only a new start helps: the engine is dead, or a step of it does not return."""
        if self.is_dead:
            raise UnavailableError("the engine is dead")
        self._check_not_stuck()

    def _check_not_stuck(self) -> None:
        if self._operations is not None and self._operations.watchdog.is_stuck:
            raise UnavailableError("a step of the engine does not return", retry_after_s=self.config.retry_after_s)

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for requests that were admitted. Raises UnavailableError while it loads and once it is dead."""
        if self._engine is None:
            raise UnavailableError("the model is loading", retry_after_s=self.config.retry_after_s)
        if not self._engine.is_alive:
            raise UnavailableError("the engine is dead")
        return self._engine

    def stats(self) -> dict[str, int | float]:
        """The engine's counters and gauges; none while it is loading."""
        return {} if self._engine is None else self._engine.stats()

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's metrics, of a dead one too. Raises UnavailableError while it loads."""
        if self._operations is None:
            raise UnavailableError(
                "there are no metrics: the model is loading", retry_after_s=self.config.retry_after_s
            )
        return self._operations.metrics

    def status(self) -> dict[str, Any]:
        """What the status page shows (`serving.status`). Any thread may ask. Raises UnavailableError as `metrics`."""
        metrics = self.metrics
        return status_snapshot(metrics.engine, metrics)

    def count_refusal(self, reason: str | None) -> None:
        """A request was refused before it ran: `reason` is one of `serving.metrics.REFUSALS`, None for one that ran."""
        if reason is None:
            return
        if self._operations is None:
            self._early_refusals[reason] += 1  # of which metrics learn once there are any
        else:
            self._operations.metrics.count_refusal(reason)

    @property
    def default_fields(self) -> dict[str, Any]:
        """The model's own sampling fields, for requests that do not give them."""
        return dict(self._defaults)

    @property
    def num_waiting(self) -> int:
        """Completions that wait for a slot. Raises UnavailableError."""
        return self.engine.engine.scheduler.num_waiting

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """Count a request as in flight. Raises UnavailableError, and OverloadedError where there are too many."""
        self.check_ready()
        config, num_waiting = self.config, self.num_waiting
        if self.num_in_flight >= config.max_concurrent_requests or num_waiting >= config.max_waiting_completions:
            raise OverloadedError(
                f"{self.num_in_flight} requests are in flight and {num_waiting} completions wait; no more are accepted",
                retry_after_s=config.retry_after_s,
            )
        delay_s = self._loop_delay.measure()
        if delay_s > config.max_loop_delay_s:
            raise OverloadedError(
                f"the server is {delay_s * 1e3:.0f} ms late with what it has; no more is accepted",
                retry_after_s=config.retry_after_s,
            )
        self.num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._idle.set()

    # Calls. Parsing needs no event loop; all of it raises RequestError.

    def parse_completion(self, body: object) -> CompletionCall:
        return self._known_model(parse_completion(body, self.config, self._defaults))

    def parse_chat(self, body: object) -> ChatCall:
        return self._known_model(parse_chat(body, self.config, self._defaults))

    def parse_tokenize(self, body: object) -> TokenizeCall:
        return self._known_model(parse_tokenize(body, self.config))

    def parse_detokenize(self, body: object) -> DetokenizeCall:
        return self._known_model(parse_detokenize(body, self.config))

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError; None means the one there is."""
        if name is not None and name != self.model_name:
            raise UnknownModelError("model", f"{shown(name)} is not served here; {shown(self.model_name)} is")

    def _known_model[Call: (CompletionCall, ChatCall, TokenizeCall, DetokenizeCall)](self, call: Call) -> Call:
        self.check_model(call.model)
        return call

    async def in_text_thread[Result](self, function: Callable[..., Result], *args: Any) -> Result:
        """Run what may take long beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, function, *args)

    async def start(self, call: CompletionCall | ChatCall, context: RequestContext | None = None) -> Generation:
        """Check everything about a call before any of it runs. Raises RequestError and UnavailableError.

        context: the tenant and the trace, for metrics and logs, and what the call does not say of its priority and
        deadline; the operation is the call's. Raises OverloadedError where the tenant is over its rate limits, or the
        first token would come too late.
        """
        engine = self.engine
        context = self._context(call, context or RequestContext())
        self._check_wait(engine, context.priority, 1)  # where no prompt would do, none need be encoded
        loop = asyncio.get_running_loop()
        if isinstance(call, CompletionCall):
            if call.constraint is None and sum(map(len, call.prompts)) <= SMALL_PROMPTS:
                checked = self._check_prompts(engine, call)
            else:
                pool = self._text_pool if call.constraint is None else self._grammar_pool
                checked = await loop.run_in_executor(pool, self._check_prompts, engine, call)
        else:
            self._formats.check(call)
            if self._formats.needs_special_tokens(call):
                call = dataclasses.replace(call, params=dataclasses.replace(call.params, skip_special_tokens=False))
            token_ids = await self._render(call)
            pool = self._text_pool if call.constraint is None and not call.tool_names else self._grammar_pool
            checked = [await loop.run_in_executor(pool, self._check_chat, engine, token_ids, call)]
        tokenizer = engine.engine.tokenizer
        answer: Answer
        if isinstance(call, CompletionCall):
            answer = CompletionAnswer(call, checked, model=self.model_name, tokenizer=tokenizer)
        else:
            answer = ChatAnswer(call, checked, model=self.model_name, tokenizer=tokenizer, formats=self._formats)
        operation: Literal["chat", "text_completion"] = "chat" if isinstance(call, ChatCall) else "text_completion"
        context = dataclasses.replace(context, operation=operation)
        generation = Generation(engine, checked, answer, context, self._rate_limits)
        num_completions = len(checked) * call.params.n
        generation.decision = self._check_wait(
            engine, context.priority, generation.num_prompt_tokens, num_completions=num_completions
        )
        self._check_rate(context.tenant, generation.num_prompt_tokens)
        return generation

    def _context(self, call: CompletionCall | ChatCall, context: RequestContext) -> RequestContext:
        """`context` with the call's own priority, and the earlier deadline."""
        deadline_s = context.deadline_s
        if call.max_queue_s is not None:
            call_deadline_s = self.now() + call.max_queue_s
            deadline_s = call_deadline_s if deadline_s is None else min(deadline_s, call_deadline_s)
        priority = context.priority if call.priority is None else call.priority
        return dataclasses.replace(context, priority=priority, deadline_s=deadline_s)

    def _check_wait(
        self, engine: AsyncEngine, priority: int, num_tokens: int, *, num_completions: int = 0
    ) -> Decision | None:
        """What admission control says of a request; with `num_completions` it counts as one that others wait behind."""
        admission, now_s = engine.engine.admission, engine.engine.now()
        if admission is None:
            return None
        if num_completions:
            decision = admission.take(priority, num_tokens, now_s, num_requests=num_completions)
        else:
            decision = admission.decide(priority, num_tokens, now_s)
        if decision.action == "refuse":
            reason = f"the first token would come after {decision.wait_s:.1f} s or more, later than is promised"
            if decision.own_s > decision.limit_s:
                reason = (
                    f"{num_tokens} prompt tokens alone take {decision.own_s:.1f} s beside what runs, and the first token "
                    f"is promised within {decision.limit_s:g} s"
                )
            raise OverloadedError(
                reason,
                retry_after_s=decision.retry_after_s,
            )
        return decision

    def _check_rate(self, tenant: str, num_prompt_tokens: int) -> None:
        assert self._rate_limits is not None
        retry_after_s = self._rate_limits.try_take(tenant, num_tokens=num_prompt_tokens, now_s=self.now())
        if retry_after_s:
            raise OverloadedError(
                f"tenant {shown(tenant)} may send {self._rate_limits.limits(tenant)}; try again in {retry_after_s} s",
                retry_after_s=retry_after_s,
            )

    def now(self) -> float:
        """The engine's clock, seconds: that of deadlines. Raises UnavailableError."""
        return self.engine.engine.now()

    def _check_prompts(self, engine: AsyncEngine, call: CompletionCall) -> list[CheckedRequest]:
        names = [f"prompt[{i}]" for i in range(len(call.prompts))] if len(call.prompts) > 1 else ["prompt"]
        return [self._check(engine, name, prompt, call) for name, prompt in zip(names, call.prompts, strict=True)]

    def _check_chat(self, engine: AsyncEngine, token_ids: list[int], call: ChatCall) -> CheckedRequest:
        tokenizer = engine.engine.tokenizer
        assert tokenizer is not None  # or there was no template
        constraint = chat_constraint(call, self._formats, prompt_end(tokenizer, token_ids), tokenizer)
        call = dataclasses.replace(call, params=constrained(call.params, constraint), constraint=constraint)
        return self._check(engine, "messages", token_ids, call)

    def _check(
        self, engine: AsyncEngine, name: str, prompt: str | Sequence[int], call: CompletionCall | ChatCall
    ) -> CheckedRequest:
        try:
            return engine.engine.check(prompt, call.params, cache_salt=call.cache_salt)
        except NotNowError as error:
            raise UnavailableError(str(error), retry_after_s=self.config.retry_after_s) from error
        except RequestError as error:
            # The engine's names of a prompt and of what outputs must match are not the request's.
            if call.constraint is not None:
                error = error_of_request(error, call.constraint)
            match = re.fullmatch(r"prompt(?:_token_ids)?(\[\d+\])?", error.field)
            if match is None:
                raise error from None
            raise RequestError(f"{name}{match[1] or ''}", str(error).removeprefix(f"{error.field}: ")) from None

    async def _render(self, call: ChatCall | TokenizeCall) -> list[int]:
        engine = self.engine.engine
        args = call.template_args
        effort = call.reasoning_effort if isinstance(call, ChatCall) else None
        if effort is not None:
            args = _with_effort(args, effort, None if engine.tokenizer is None else engine.tokenizer.chat_template)
        return await asyncio.get_running_loop().run_in_executor(
            self._template_pool, lambda: engine.render_chat(call.messages or (), **args.as_keywords())
        )

    async def tokenize(self, call: TokenizeCall) -> dict[str, Any]:
        """vLLM's answer of /tokenize."""
        engine = self.engine.engine
        if call.messages is not None:
            token_ids = await self._render(call)
        else:
            token_ids = await self.in_text_thread(self._encode, call)
        answer: dict[str, Any] = {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": engine.max_model_len,
        }
        if call.return_token_strs:
            answer["token_strs"] = [shown_token(engine.tokenizer, token_id) for token_id in token_ids]
        return answer

    def _encode(self, call: TokenizeCall) -> list[int]:
        engine = self.engine.engine
        assert call.prompt is not None
        if engine.tokenizer is None:
            raise RequestError("prompt", "cannot be encoded: this model has no tokenizer")
        check_text_length(call.prompt, engine.max_model_len)
        try:
            return engine.tokenizer.encode(
                call.prompt, add_special_tokens=call.add_special_tokens, allow_special_text=True
            )
        except TokenizerError as error:
            raise RequestError("prompt", f"cannot be encoded: {error}") from None

    async def detokenize(self, call: DetokenizeCall) -> dict[str, Any]:
        """vLLM's answer of /detokenize."""
        engine = self.engine.engine
        if engine.tokenizer is None:
            raise RequestError("tokens", "cannot be decoded: this model has no tokenizer")
        for index, token_id in enumerate(call.token_ids):
            if token_id >= engine.model_config.vocab_size:
                raise RequestError(f"tokens[{index}]", f"{token_id} is outside the vocabulary")

        def decode() -> str:
            return prompt_text(engine.tokenizer, call.token_ids, skip_special_tokens=False)

        return {"prompt": await self.in_text_thread(decode)}

    def tokenizer_info(self) -> dict[str, Any]:
        """vLLM's answer of /tokenizer_info but for the chat template, which stays with the server: /tokenize renders.

        Raises NotFoundError for a model without a tokenizer, and UnavailableError.
        """
        engine = self.engine.engine
        if engine.tokenizer is None:
            raise NotFoundError("tokenizer", "there is none: this model takes token ids")
        return {
            "tokenizer_class": type(engine.tokenizer).__name__,
            "model_max_length": engine.max_model_len,
            **engine.tokenizer.special_tokens,  # bos_token, eos_token, ...
        }

    def models(self) -> list[dict[str, Any]]:
        """The models that clients may name, in OpenAI's form."""
        return [
            {
                "id": self.model_name,
                "object": "model",
                "created": self.created_s,
                "owned_by": "headrace",
                "root": self.source,
                "parent": None,
                "max_model_len": self.engine.engine.max_model_len,
            }
        ]


class Generation:
    """One call under way: ask for its deltas, its chunks or its whole answer, once.

    Leaving it early, by closing the generator or cancelling the task, aborts all of it. Raises GenerationError where
    the engine failed it, and GivenUpError where the engine stopped.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        checked: Sequence[CheckedRequest],
        answer: Answer,
        context: RequestContext | None = None,
        rate_limits: RateLimits | None = None,
    ):
        self._engine = engine
        self._context = context
        self._rate_limits = rate_limits
        self.decision: Decision | None = None  # of admission control
        self.checked = checked
        self.answer = answer

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.checked)

    def _count_output(self, batch: list[RequestDelta]) -> None:
        if self._rate_limits is not None and self._context is not None:
            num_tokens = sum(len(delta.new_token_ids) for _, delta, _ in batch)
            self._rate_limits.take_output(self._context.tenant, num_tokens, self._engine.engine.now())

    def _learn_wait(self, started_s: float) -> None:
        engine = self._engine.engine
        if engine.admission is not None and self.decision is not None and self._context is not None:
            engine.admission.learn(self._context.priority, self.decision.wait_s, engine.now() - started_s)

    async def batches(self) -> AsyncGenerator[list[RequestDelta], None]:
        """Lists of (index of the prompt, delta, the prompt's whole output beside its last delta): all at hand."""
        from serving.async_engine import EngineDeadError

        # The answer's name is the engine's name for the request, so that logs and traces have it.
        ids = [self.answer.id]
        if len(self.checked) > 1:
            ids = [f"{self.answer.id}-{index}" for index in range(len(self.checked))]
        requests = self._engine.generate_in_batches(self.checked, ids, context=self._context)
        started_s, is_first = self._engine.engine.now(), True
        try:
            async with contextlib.aclosing(requests) as batches:
                async for batch in batches:
                    if is_first:
                        is_first = False
                        self._learn_wait(started_s)
                    self._count_output(batch)
                    yield batch
        except EngineDeadError as error:
            raise GivenUpError("the engine is dead") from error

    async def deltas(self) -> AsyncGenerator[RequestDelta, None]:
        """What `batches` gives, one by one."""
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for item in batch:
                    yield item

    async def whole(self, on_first_token: Callable[[], None] = lambda: None) -> dict[str, Any]:
        outputs: dict[int, RequestOutput] = {}
        is_started = False
        async with contextlib.aclosing(self.deltas()) as items:
            async for prompt_index, _, output in items:
                if not is_started:
                    is_started = True
                    on_first_token()
                if output is not None:
                    outputs[prompt_index] = output
        return self.answer.whole([outputs[index] for index in range(len(self.checked))])


def _with_effort(args: TemplateArgs, effort: str, template: str | None) -> TemplateArgs:
    if template is None or not re.search(r"\breasoning_effort\b", template):
        raise RequestError("reasoning_effort", "is given, and the model's chat template does not use it")
    if "reasoning_effort" in args.chat_template_kwargs:
        raise RequestError("reasoning_effort", "is in chat_template_kwargs too: give one of them")
    return dataclasses.replace(args, chat_template_kwargs={**args.chat_template_kwargs, "reasoning_effort": effort})
