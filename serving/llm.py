"""LLM: generate and chat over lists of prompts, in a notebook, a script or the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig
from configs.scheduling import SchedulingConfig
from serving.display import ProgressReporter, output_html, stats_html
from serving.engine import CheckedRequest, Engine, Prompt, build_engine
from serving.request import RequestContext, RequestError, RequestOutput, SamplingParams, shown
from serving.text.generation_config import default_sampling

PromptInput = str | Mapping[str, Any] | Sequence[int]


class RequestOutputs(list[RequestOutput]):
    """Outputs in input order; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return output_html(self)


class EngineStats(dict[str, Any]):
    """Counters and gauges by name, units in the names; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return stats_html(self)


class LLM:
    """A model ready to generate.

    `model` is a folder with config.json and safetensors, a .gguf file, an Orbax folder, `package:NAME` (a model in an
    installed package) or `dummy:FOLDER` (random weights). Other keywords are fields of EngineConfig.
    Any thread may call `generate` and `chat`; calls run one after the other, as only one may step the engine.
    Raises ConfigError or CheckpointError where it cannot be served.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tensor_parallel_size: int = 1,
        engine_config: EngineConfig | None = None,
        mesh_config: MeshConfig | None = None,
        scheduling_config: SchedulingConfig | None = None,
        show_progress: bool = True,
        **overrides: Any,
    ):
        if mesh_config is not None and tensor_parallel_size != 1:
            raise ConfigError(f"tensor_parallel_size={tensor_parallel_size} contradicts mesh_config: give one of them")
        config = dataclasses.replace(engine_config or EngineConfig(), **overrides)
        progress = ProgressReporter(show_progress)
        started_s = time.monotonic()
        self.engine: Engine = build_engine(
            model,
            config,
            mesh_config or MeshConfig(tensor=tensor_parallel_size),
            scheduling=scheduling_config,
            progress=progress,
        )
        self.start_s = time.monotonic() - started_s
        progress.note(f"ready after {self.start_s:.1f} s; memory of one device:\n{self.engine.runner.ledger}")
        self._lock = threading.Lock()  # held by the call that steps the engine
        self._running_thread_id: int | None = None

    @property
    def tokenizer(self):
        """The model's tokenizer, or None for a model that takes token ids only."""
        return self.engine.tokenizer

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's own generation defaults under the given fields."""
        return default_sampling(self.engine.generation_config, max_model_len=self.engine.max_model_len, **overrides)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] = 0,
    ) -> RequestOutputs:
        """Complete every prompt; outputs are in input order.

        A prompt is a text, a list of token ids, `{"prompt": text}`, `{"prompt_token_ids": [...]}` or
        `{"messages": [...]}`. Sampling settings and priorities (lower is served first) are one for all or one a prompt. Every prompt is checked before any
        runs: RequestError names the first that is refused.
        """
        listed = _as_prompt_list(prompts)
        params = self._params_list(sampling_params, len(listed))
        resolved: list[Prompt] = []
        for i, prompt in enumerate(listed):
            with _naming(i):
                resolved.append(self._resolve(prompt))
        return self._run(resolved, params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] = 0,
        **template_args: Any,
    ) -> RequestOutputs:
        """Answer one conversation (a list of messages) or several (a list of such lists).

        template_args are those of `serving.text.chat_template.ChatTemplate.render`: tools, documents and others.
        """
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise RequestError("messages", f"must be a list of messages or of such lists, got {shown(messages)}")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = self._params_list(sampling_params, len(conversations))
        prompts: list[Prompt] = []
        for i, conversation in enumerate(conversations):
            with _naming(i):
                prompts.append(self.render_chat(conversation, **template_args))
        return self._run(prompts, params, use_tqdm, priority)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template. Raises RequestError."""
        return self.engine.render_chat(messages, **template_args)

    def _params_list(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise RequestError("sampling_params", f"must be SamplingParams or a list of them, got {shown(given)}")
        if len(given) != count:
            raise RequestError("sampling_params", f"has {len(given)} entries for {count} prompts")
        for i, params in enumerate(given):
            if not isinstance(params, SamplingParams):
                raise RequestError(f"sampling_params[{i}]", f"must be SamplingParams, got {shown(params)}")
        return list(given)

    def _resolve(self, prompt: PromptInput) -> Prompt:
        if not isinstance(prompt, Mapping):
            return prompt
        known = {"prompt", "prompt_token_ids", "messages"}
        keys = [key for key in prompt if key in known]
        unknown = [key for key in prompt if key not in known]
        if len(keys) != 1 or unknown:
            raise RequestError("keys", f"must be exactly one of {', '.join(sorted(known))}; has {list(prompt)}")
        if keys[0] == "messages":
            return self.render_chat(prompt["messages"])
        value = prompt[keys[0]]
        if keys[0] == "prompt" and not isinstance(value, str):
            raise RequestError("prompt", f"must be a text, got {type(value).__name__}")
        if keys[0] == "prompt_token_ids" and isinstance(value, str):
            raise RequestError("prompt_token_ids", f"must be a list of integers, got {value[:80]!r}")
        return value

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int],
    ) -> RequestOutputs:
        engine = self.engine
        contexts = _contexts(priority, len(prompts))
        checked: list[CheckedRequest] = []
        for i, (prompt, settings) in enumerate(zip(prompts, params, strict=True)):
            with _naming(i):
                checked.append(engine.check(prompt, settings))
        with self._alone(), _interrupts_between_steps() as check_interrupt:
            request_ids: list[str] = []
            bar = None
            try:
                for request, context in zip(checked, contexts, strict=True):
                    check_interrupt()
                    request_ids.append(engine.add_checked(request, context=context))
                bar = _progress_bar(use_tqdm, len(prompts))
                num_output_tokens, started_s = 0, time.monotonic()
                finished: set[str] = set()
                while len(finished) < len(request_ids):
                    check_interrupt()
                    for delta in engine.step():
                        num_output_tokens += len(delta.new_token_ids)
                        if delta.request_finished:
                            finished.add(delta.request_id)
                            if bar is not None:
                                bar.update(1)
                                elapsed_s = max(time.monotonic() - started_s, 1e-9)
                                bar.set_postfix_str(f"{num_output_tokens / elapsed_s:.1f} output tok/s")
                _drain(engine)
                return RequestOutputs(engine.collect(request_id) for request_id in request_ids)
            except BaseException:
                # Ctrl-C, or a progress bar that raised: nothing of this call stays behind.
                for request_id in request_ids:
                    engine.discard(request_id)
                _drain(engine)
                raise
            finally:
                if bar is not None:
                    bar.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for calls of other threads to end; a call from inside a call would wait for itself, and is refused."""
        if self._running_thread_id == threading.get_ident():
            raise RuntimeError("generate or chat was called from inside a generate or chat of the same LLM")
        with self._lock:
            self._running_thread_id = threading.get_ident()
            try:
                yield
            finally:
                self._running_thread_id = None

    def stats(self) -> EngineStats:
        """Counters since start and gauges of now, as `serving.engine.Engine.stats` explains them."""
        engine = self.engine
        return EngineStats(engine.stats(), start_s=round(self.start_s, 2))

    def _repr_html_(self) -> str:
        return stats_html(self.stats())


def _contexts(priority: int | Sequence[int], count: int) -> list[RequestContext]:
    if isinstance(priority, int):
        return [RequestContext(priority=priority)] * count
    if isinstance(priority, str | bytes) or not isinstance(priority, Sequence):
        raise RequestError("priority", f"must be an integer or a list of integers, got {shown(priority)}")
    if len(priority) != count:
        raise RequestError("priority", f"has {len(priority)} entries for {count} prompts")
    contexts = []
    for i, each in enumerate(priority):
        with _naming(i):
            contexts.append(RequestContext(priority=each))
    return contexts


def _drain(engine: Engine) -> None:
    """Read the step that runs ahead of the last output: until then it holds pages, and the device works on it."""
    while engine.has_work():
        engine.step()


@contextlib.contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C while a step runs, which would lose the device's state; the yielded function raises it."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.set())

    def check() -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous or signal.default_int_handler)


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say which prompt of a call was refused."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompts[{index}]", str(error)) from None


def _as_prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError("prompts", f"must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if not prompts:
        return []
    if isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]  # one prompt as token ids
    return list(cast(Sequence[PromptInput], prompts))


def _progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm:
        return None
    from tqdm.auto import tqdm

    make_bar = tqdm if isinstance(use_tqdm, bool) else use_tqdm
    return make_bar(total=total, desc="requests", unit="req", dynamic_ncols=True)
