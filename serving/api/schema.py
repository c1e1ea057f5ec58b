"""The one request schema: a table of every field, and functions from a decoded JSON object to a frozen call.

HTTP, gRPC and batch files all come through here, so that a request gets the same verdict at every door. Everything
wrong is a RequestError naming the field; a field that is not in the table is refused by its name. What needs the model
(vocabulary, context) is checked after it by `serving.validation`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.scheduling import MAX_PRIORITY, MIN_PRIORITY
from configs.server import ServerConfig
from serving.api.fields import (
    Boolean,
    Choice,
    Field,
    Integer,
    Kind,
    NoEffect,
    Number,
    Only,
    Structure,
    Text,
    Texts,
    TokenIds,
    TokenNumbers,
    check_keys,
    read_token_ids,
    short,
)
from serving.api.output_constraint import (
    OutputConstraint,
    constrained,
    read_constraint,
    read_response_format,
    read_structured_outputs,
)
from serving.api.tools import (
    ToolChoice,
    ToolSpec,
    check_tool_choice,
    read_tool_choice,
    read_tools,
)
from serving.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_LIST,
    RequestError,
    SamplingParams,
    shown,
)
from serving.text.chat_messages import check_messages, check_objects, plain_json

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = ENDPOINTS = ("completions", "chat", "tokenize", "detokenize")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_INT32 = 2**31 - 1
MIN_QUEUE_S, MAX_QUEUE_S = 0.001, 86400.0
# vLLM's names before structured_outputs.
GUIDED = {f"guided_{key}": key for key in ("json", "regex", "choice", "grammar")}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    include_usage: bool = False  # one more chunk at the end, with the usage and no choices
    continuous_usage_stats: bool = False  # the usage so far in every chunk


@dataclass(frozen=True, kw_only=True)
class GenerationCall:
    """What completions and chats have in common."""

    params: SamplingParams
    model: str | None = None  # as the client names it
    stream: StreamOptions | None = None  # None: one answer at the end
    request_id: str | None = None  # the client's own name for it
    cache_salt: bytes = b""  # of fixed size, whatever the client's salt was
    return_token_ids: bool = False
    priority: int | None = None  # lower is served first; None: that of the door
    max_queue_s: float | None = None  # seconds in which it must have begun; None: it waits
    constraint: OutputConstraint | None = None  # what params.structured is made of


@dataclass(frozen=True, kw_only=True)
class CompletionCall(GenerationCall):
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False
    show_prompt_logprobs: bool = False  # asked for by name, and not only for echo


@dataclass(frozen=True, kw_only=True)
class TemplateArgs:
    """Keywords of `serving.text.chat_template.ChatTemplate.render_ids` beside the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def as_keywords(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True)
class ChatCall(GenerationCall):
    messages: Sequence[Mapping[str, Any]]
    template_args: TemplateArgs
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Tools that the model may call."""
        if self.tool_choice.mode == "none":
            return ()
        return tuple(tool.name for tool in self.tools if self.tool_choice.name in (None, tool.name))


@dataclass(frozen=True, kw_only=True)
class TokenizeCall:
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    template_args: TemplateArgs = TemplateArgs()
    add_special_tokens: bool = True  # for a prompt; a chat's template writes its own
    return_token_strs: bool = False


@dataclass(frozen=True, kw_only=True)
class DetokenizeCall:
    token_ids: tuple[int, ...]
    model: str | None = None


@functools.lru_cache(maxsize=8)
def request_fields(config: ServerConfig) -> tuple[Field, ...]:
    """Every field of every endpoint under the limits of `config`."""
    fields: list[Field] = []

    def add(names: str, kind: Kind, *endpoints: str, to: str | None = None, default: Any = None) -> None:
        for name in names.split():
            fields.append(
                Field(
                    name=name, kind=kind, endpoints=frozenset(endpoints), to=name if to is None else to, default=default
                )
            )

    def sampling(names: str, kind: Kind, *endpoints: str, to: str | None = None) -> None:
        for name in names.split():
            fields.append(
                Field(
                    name=name,
                    kind=kind,
                    endpoints=frozenset(endpoints or (COMPLETIONS, CHAT)),
                    to=name if to is None else to,
                    is_sampling=True,
                )
            )

    generation = (COMPLETIONS, CHAT)
    templated = (CHAT, TOKENIZE)
    identifier = Text(config.max_id_chars)
    messages = Structure(lambda _, value: check_messages(value), ([{"role": "user", "content": "a"}],))
    objects: tuple[Any, ...] = ({}, {"a": [1, None]})

    add("model", identifier, *ENDPOINTS)
    add("prompt", Structure(functools.partial(_read_prompts, config=config), ("a", ["a"], [1], [[1]])), COMPLETIONS)
    add("prompt", Structure(_read_text, ("a", "")), TOKENIZE)
    add("messages", messages, *templated)
    add("tokens", TokenIds(config.max_body_bytes), DETOKENIZE)

    sampling("n", Integer(1, config.max_n))
    sampling("temperature", Number(0.0, 100.0))
    sampling("top_p", Number(0.0, 1.0))
    sampling("top_k", Integer(-1, MAX_INT32))
    sampling("min_p", Number(0.0, 1.0))
    sampling("seed", Integer(-(2**63), MAX_SEED))
    sampling("stop", Texts(config.max_stop_strings, config.max_stop_chars))
    sampling("stop_token_ids", TokenIds(MAX_STOP_TOKEN_IDS))
    sampling("include_stop_str_in_output ignore_eos skip_special_tokens", Boolean())
    sampling("max_tokens", Integer(0, MAX_INT32))
    sampling("max_completion_tokens", Integer(0, MAX_INT32), CHAT, to="max_tokens")
    sampling("min_tokens", Integer(0, MAX_INT32))
    sampling("logprobs", Integer(0, MAX_LOGPROBS), COMPLETIONS)
    sampling("prompt_logprobs", Integer(0, MAX_LOGPROBS))
    sampling("repetition_penalty", Number(0.01, 100.0))
    sampling("presence_penalty frequency_penalty", Number(-100.0, 100.0))
    sampling("logit_bias", TokenNumbers(MAX_LOGIT_BIAS, -100.0, 100.0))
    sampling("allowed_token_ids", TokenIds(MAX_TOKEN_LIST, 1))
    sampling("banned_token_ids", TokenIds(MAX_TOKEN_LIST))

    add("logprobs", Boolean(), CHAT, default=False)
    add("top_logprobs", Integer(0, MAX_LOGPROBS), CHAT)
    add("echo", Boolean(), COMPLETIONS, default=False)
    add("best_of", Integer(1, config.max_n), COMPLETIONS)
    add("stream return_token_ids", Boolean(), *generation, default=False)
    add("stream_options", Structure(_read_stream_options, ({}, {"include_usage": True})), *generation)
    add("request_id", Structure(functools.partial(read_request_id, config=config), ("a-1", "A:1_2.3")), *generation)
    add("cache_salt", identifier, *generation)
    add("priority", Integer(MIN_PRIORITY, MAX_PRIORITY), *generation)
    add("max_queue_s", Number(MIN_QUEUE_S, MAX_QUEUE_S), *generation)

    add("add_generation_prompt", Boolean(), *templated)
    add("continue_final_message", Boolean(), *templated, default=False)
    add("chat_template_kwargs", Structure(_read_template_kwargs, objects), *templated)
    add("documents", Structure(check_objects, ([{"title": "a", "text": "b"}],)), *templated)
    add("reasoning_effort", Choice(REASONING_EFFORTS), CHAT)
    add("add_special_tokens", Boolean(), TOKENIZE)
    add("return_token_strs", Boolean(), TOKENIZE, default=False)

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    read = functools.partial(read_tools, config=config)
    add("tools", Structure(read, ([], [tool])), *templated)
    add("tool_choice", Structure(read_tool_choice, ("none", "auto", "required")), CHAT)
    add("parallel_tool_calls", Boolean(), CHAT, default=True)
    schema_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    formats = ({"type": "text"}, {"type": "json_object"}, schema_format)
    add("response_format", Structure(functools.partial(read_response_format, config=config), formats), *generation)
    structures: tuple[Any, ...] = (
        {"json": {}},
        {"json_object": True},
        {"regex": "a"},
        {"choice": ["a"]},
        {"grammar": "start: /a/"},
    )
    read_structured = functools.partial(read_structured_outputs, config=config)
    add("structured_outputs", Structure(read_structured, structures), *generation)
    for name, key in GUIDED.items():
        read_guided = functools.partial(_read_guided, key=key, config=config)
        examples = tuple(given[key] for given in structures if key in given)
        add(name, Structure(read_guided, examples), *generation)

    add("user metadata prompt_cache_key safety_identifier prompt_cache_retention", NoEffect(), *generation, to="")
    add("store", Only((False,), "is not offered: nothing is kept"), *generation, to="")
    add("service_tier", Only(("auto", "default"), "has no tiers but auto and default"), *generation, to="")
    add("modalities", Only((["text"],), "has text alone"), CHAT, to="")
    add("suffix", Only((), "is not offered: text is only continued"), COMPLETIONS, to="")
    add("bad_words", Only(([],), "is not offered: use logit_bias"), *generation, to="")
    add("kv_transfer_params", Only((), "is not for clients to set"), *generation, to="")
    add("chat_template", Only((), "is not offered: the model's own is used"), *templated, to="")
    add("functions function_call", Only((), "is OpenAI's old form: use tools and tool_choice"), CHAT, to="")
    return tuple(fields)


def parse_completion(body: object, config: ServerConfig, defaults: Mapping[str, Any] | None = None) -> CompletionCall:
    """The call that a body of /v1/completions asks for.

    `defaults` are the model's own sampling fields (`serving.text.generation_config.default_fields`), under which those
    of `SamplingParams` lie. Raises RequestError.
    """
    values = _read(COMPLETIONS, body, config, required=("prompt",))
    fields = _sampling_fields(COMPLETIONS, values, config, {**(defaults or {})})
    if values["best_of"] not in (None, fields.get("n", 1)):
        raise RequestError("best_of", f"{values['best_of']} is not n={fields.get('n', 1)}: choosing is not offered")
    show_prompt_logprobs = "prompt_logprobs" in fields
    if values["echo"] and fields.get("logprobs") is not None:
        fields["prompt_logprobs"] = max(fields["logprobs"], fields.get("prompt_logprobs", 0))
    elif values["echo"] and fields.get("max_tokens") == 0:
        fields.setdefault("prompt_logprobs", 0)  # the engine takes no output at all for a prompt to score
    num_completions = len(values["prompt"]) * fields.get("n", 1)
    if num_completions > config.max_completions:
        raise RequestError("n", f"times prompts is {num_completions}; at most {config.max_completions} are accepted")
    stream = _stream(values)
    if stream is not None and (show_prompt_logprobs or (values["echo"] and fields.get("logprobs") is not None)):
        named = "prompt_logprobs" if show_prompt_logprobs else "echo"
        raise RequestError(named, "with log-probs of the prompt cannot be streamed: ask with stream=false")
    return CompletionCall(
        **_common(values, fields),
        stream=stream,
        prompts=values["prompt"],
        echo=values["echo"],
        show_prompt_logprobs=show_prompt_logprobs,
    )


def parse_chat(body: object, config: ServerConfig, defaults: Mapping[str, Any] | None = None) -> ChatCall:
    """The call that a body of /v1/chat/completions asks for; arguments as of `parse_completion`."""
    values = _read(CHAT, body, config, required=("messages",))
    if len({values["max_tokens"], values["max_completion_tokens"]} - {None}) > 1:
        raise RequestError("max_completion_tokens", "is not max_tokens, which it replaces: give one of them")
    fields = _sampling_fields(CHAT, values, config, {"max_tokens": None, **(defaults or {})})
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise RequestError("top_logprobs", "needs logprobs=true")
    if values["logprobs"]:
        fields["logprobs"] = values["top_logprobs"] or 0
    stream = _stream(values)
    if stream is not None and "prompt_logprobs" in fields:
        raise RequestError("prompt_logprobs", "cannot be streamed: ask with stream=false")
    tools = values["tools"] or ()
    choice = check_tool_choice(values["tool_choice"], tools)
    args = _template_args(values, body)
    if choice.mode == "none":  # a model that is not told of tools does not call them
        args = dataclasses.replace(args, tools=None)
    return ChatCall(
        **_common(values, fields),
        stream=stream,
        messages=values["messages"],
        template_args=args,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=values["parallel_tool_calls"],
        reasoning_effort=values["reasoning_effort"],
    )


def parse_tokenize(body: object, config: ServerConfig) -> TokenizeCall:
    """The call that a body of /tokenize asks for: the tokens of a prompt, or of messages as a chat renders them."""
    values = _read(TOKENIZE, body, config)
    prompt, messages = values["prompt"], values["messages"]
    if (prompt is None) == (messages is None):
        raise RequestError("prompt", "and messages: exactly one of them must be given")
    if messages is not None and values["add_special_tokens"]:
        raise RequestError("add_special_tokens", "does not go with messages: the chat template writes its own")
    if messages is None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents", "tools"):
            if values[name]:
                raise RequestError(name, "goes with messages alone")
    return TokenizeCall(
        model=values["model"],
        prompt=prompt,
        messages=messages,
        template_args=_template_args(values, body),
        add_special_tokens=values["add_special_tokens"] is not False,
        return_token_strs=values["return_token_strs"],
    )


def parse_detokenize(body: object, config: ServerConfig) -> DetokenizeCall:
    """The call that a body of /detokenize asks for."""
    values = _read(DETOKENIZE, body, config, required=("tokens",))
    return DetokenizeCall(model=values["model"], token_ids=values["tokens"])


def read_request_id(name: str, value: object, config: ServerConfig) -> str:
    """A client's name for its request: visible ASCII, so that it can go into a header and a line of a log."""
    text = Text(config.max_id_chars).read(name, value)
    if not all("!" <= character <= "~" for character in text):
        raise RequestError(name, f"must be visible ASCII characters without a space, got {shown(text)}")
    return text


def _read(endpoint: str, body: object, config: ServerConfig, required: Sequence[str] = ()) -> dict[str, Any]:
    """The value of every field of `endpoint` in `body`, its default where it is absent."""
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    fields = {item.name: item for item in request_fields(config) if endpoint in item.endpoints}
    for name in body:
        if name not in fields:
            raise RequestError(short(name), f"is not a field of {endpoint} requests here")
    values: dict[str, Any] = {}
    for name, item in fields.items():
        given = body.get(name)
        if given is None and name in required:
            raise RequestError(name, "is missing")
        values[name] = item.default if given is None else item.kind.read(name, given)
    return values


def _sampling_fields(
    endpoint: str, values: Mapping[str, Any], config: ServerConfig, defaults: dict[str, Any]
) -> dict[str, Any]:
    """Fields of SamplingParams: those given, over `defaults`."""
    for item in request_fields(config):
        if item.is_sampling and endpoint in item.endpoints and values[item.name] is not None:
            defaults[item.to] = values[item.name]
    return defaults


def _common(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in ("response_format", "structured_outputs", *GUIDED) if values[name] is not None]
    if len(given) > 1:
        raise RequestError(given[1], f"and {given[0]} cannot go together")
    constraint = values[given[0]] if given else None
    salt = values["cache_salt"]
    return {
        "params": constrained(SamplingParams(**fields), constraint),
        "constraint": constraint,
        "model": values["model"],
        "request_id": values["request_id"],
        # no tier below sees a client's text
        "cache_salt": b""
        if salt is None
        else hashlib.blake2b(salt.encode("utf-8", "replace"), digest_size=16).digest(),
        "return_token_ids": values["return_token_ids"],
        "priority": values["priority"],
        "max_queue_s": values["max_queue_s"],
    }


def _stream(values: Mapping[str, Any]) -> StreamOptions | None:
    if values["stream"]:
        return values["stream_options"] or StreamOptions()
    if values["stream_options"] is not None:
        raise RequestError("stream_options", "needs stream=true")
    return None


def _template_args(values: Mapping[str, Any], body: object) -> TemplateArgs:
    continues = values["continue_final_message"]
    generates = values["add_generation_prompt"]
    assert isinstance(body, Mapping)
    return TemplateArgs(
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        tools=body.get("tools") or None,
        documents=values["documents"],
        chat_template_kwargs=values["chat_template_kwargs"] or {},
    )


def _read_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(name, f"must be a string, got {shown(value)}")
    return value


def _read_prompts(name: str, value: object, config: ServerConfig) -> tuple[str | tuple[int, ...], ...]:
    """Prompts as a text, a list of texts, the token ids of one, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise RequestError(name, f"must be a string, token ids, or a list of either; got {shown(value)}")
    if not value:
        raise RequestError(name, "is an empty list")
    if type(value[0]) is int:
        return (read_token_ids(name, value),)
    if len(value) > config.max_prompts:
        raise RequestError(name, f"has {len(value)} prompts; at most {config.max_prompts} are accepted")
    of_texts = isinstance(value[0], str)
    prompts: list[str | tuple[int, ...]] = []
    for index, item in enumerate(value):
        inner = f"{name}[{index}]"
        if of_texts:
            prompts.append(_read_text(inner, item))
        elif isinstance(item, list):
            if not item:
                raise RequestError(inner, "is an empty list")
            prompts.append(read_token_ids(inner, item))
        else:
            raise RequestError(inner, f"must be a list of token ids, got {shown(item)}")
    return tuple(prompts)


def _read_stream_options(name: str, value: object) -> StreamOptions:
    given = check_keys(name, value, ("include_usage", "continuous_usage_stats", "include_obfuscation"))
    flags = {key: Boolean().read(f"{name}.{key}", item) for key, item in given.items()}
    if flags.pop("include_obfuscation", False):
        raise RequestError(f"{name}.include_obfuscation", "is not offered")
    return StreamOptions(**flags)


def _read_guided(name: str, value: object, *, key: str, config: ServerConfig) -> OutputConstraint:
    return read_constraint(name, key, value, config)


def _read_template_kwargs(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(name, f"must be an object, got {shown(value)}")
    checked: dict[str, Any] = plain_json(name, value)
    return checked
