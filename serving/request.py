"""What a client asks for and what it gets: Request, SamplingParams, RequestOutput. No JAX here.

`SamplingParams` checks itself where it is made, against limits that need no model; `serving.validation`
checks the rest against the model's vocabulary and context, and is the one door every interface goes through.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from configs.scheduling import MAX_PRIORITY, MIN_PRIORITY
from serving.operations.trace_context import TraceContext

if TYPE_CHECKING:
    from serving.scheduling.prefix_cache import HashedPrompt

MAX_N = 128  # completions of one prompt
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 1024
MAX_TOKEN_LIST = 65536  # allowed or banned token ids of one request
MAX_SEED = 2**64 - 1
MAX_TENANT_CHARS = 64
DEFAULT_TENANT = "default"
MAX_STRUCTURED_CHARS = 2**18  # of a schema as JSON, a pattern, a grammar, or all choices together
MAX_STRUCTURED_DEPTH = 64  # arrays and objects inside one another in a JSON schema
MAX_CHOICES = 4096
MIN_TEMPERATURE = 1e-5  # below it logits over temperature lose all but the best token: greedy


class RequestError(ValueError):
    """A request that cannot be served. `field` names what is wrong; the message holds field and value."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class NotNowError(RequestError):
    """A request that cannot be served now, through no fault of its own: the same may be a moment later."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"  # its deadline passed before it was given a slot
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


def shown(value: object) -> str:
    """A value of a client's as a message shows it: short, and whatever its repr does."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python shows, or an object whose repr is broken
        return "a number too long to show" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, f"must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise RequestError(name, f"must be in [{low}, {high}], got {shown(value)}")
    return value


def _float(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(name, f"must be a number, got {shown(value)}")
    if not low <= value <= high:  # NaN is refused too, and so is an integer larger than any float
        raise RequestError(name, f"must be a finite number in [{low}, {high}], got {shown(value)}")
    return float(value)


def _ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(name, f"must be a list of token ids, got {shown(value)}")
    if len(value) > limit:
        raise RequestError(name, f"has {len(value)} entries; at most {limit} are accepted")
    return tuple(_int(f"{name}[{i}]", v, 0, 2**31 - 1) for i, v in enumerate(value))


class FrozenDict(dict[int, float]):
    """A dict that cannot change; unlike MappingProxyType it can be pickled, copied, and taken apart by `asdict`."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("sampling settings cannot change: make new ones with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[int, float]]]:
        return type(self), (dict(self),)


StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What an output must match. Checks form, size and depth here; `Engine.check` compiles it. Raises RequestError.

    kind and value: "json_schema", a schema as an object, a boolean or their JSON text; "json_object", None (any JSON
    object); "regex", a pattern in the syntax of Rust's regex crate that the whole output matches (\\d: ASCII digits);
    "choice", a list of texts; "grammar", a Lark (as llguidance extends it) or GBNF grammar. `value` is kept as text: JSON for a schema and for
    choices, in the order given, which for properties is the order of the output.
    """

    kind: StructuredKind
    value: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in get_args(StructuredKind):
            known = ", ".join(get_args(StructuredKind))
            raise RequestError("structured.kind", f"must be one of {known}, got {shown(self.kind)}")
        field, value = f"structured.{self.kind}", self.value
        if self.kind == "json_schema":
            value = _json_value(field, value)
            if not isinstance(value, dict | bool):
                raise RequestError(field, f"must be an object or a boolean, got {shown(value)}")
            value = json.dumps(value, separators=(",", ":"))
        elif self.kind == "json_object":
            if value is not None and value != "":
                raise RequestError(field, f"takes no value, got {shown(value)}")
            value = ""
        elif self.kind == "choice":
            value = _choices(field, value)
        elif not isinstance(value, str) or not value:
            raise RequestError(field, f"must be a text that is not empty, got {shown(value)}")
        else:
            _check_text(field, value)
        if len(value) > MAX_STRUCTURED_CHARS:
            raise RequestError(field, f"has {len(value)} characters; at most {MAX_STRUCTURED_CHARS} are accepted")
        object.__setattr__(self, "value", value)

    @classmethod
    def from_fields(cls, fields: object) -> StructuredOutput:
        """From an object {"kind": ..., "value": ...} out of JSON."""
        if not isinstance(fields, Mapping) or not {"kind"} <= set(fields) <= {"kind", "value"}:
            raise RequestError("structured", f'must be an object of "kind" and "value", got {shown(fields)}')
        return cls(**fields)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> StructuredOutput:
        """JSON that a schema (JSON Schema, draft 2020-12 or older) accepts."""
        return cls(kind="json_schema", value=schema)

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Any JSON object."""
        return cls(kind="json_object")

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """A text that the pattern matches from its first to its last character."""
        return cls(kind="regex", value=pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> StructuredOutput:
        """One of these texts."""
        return cls(kind="choice", value=choices)

    @classmethod
    def grammar(cls, text: str) -> StructuredOutput:
        """A text that a context-free grammar accepts."""
        return cls(kind="grammar", value=text)


def _check_text(field: str, text: str) -> None:
    if len(text) > MAX_STRUCTURED_CHARS:
        raise RequestError(field, f"has {len(text)} characters; at most {MAX_STRUCTURED_CHARS} are accepted")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(field, f"holds half of a surrogate pair, which no output has: {shown(text)}") from None


def _choices(field: str, value: object) -> str:
    if isinstance(value, str):
        value = _json_value(field, value)
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise RequestError(field, f"must be a list of texts that is not empty, got {shown(value)}")
    if len(value) > MAX_CHOICES:
        raise RequestError(field, f"has {len(value)} entries; at most {MAX_CHOICES} are accepted")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise RequestError(f"{field}[{i}]", f"must be a text, got {shown(text)}")
        _check_text(f"{field}[{i}]", text)
    return json.dumps(list(value), separators=(",", ":"))


def _json_value(field: str, value: object) -> Any:
    """A JSON value from its text or from Python objects, checked for types and depth."""
    if isinstance(value, str):
        _check_text(field, value)
        try:
            value = json.loads(value, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise RequestError(field, f"is not JSON: {error}") from None
    return _plain_json(field, value, MAX_STRUCTURED_DEPTH)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key is given twice")
    return fields


def _plain_json(field: str, value: object, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        _check_text(field, value)
        return str.__str__(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and abs(value) < float("inf"):
        return float(value)
    if isinstance(value, Mapping | list | tuple) and not depth:
        raise RequestError(field, f"is nested more than {MAX_STRUCTURED_DEPTH} deep")
    if isinstance(value, list | tuple):
        return [_plain_json(field, item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(field, f"has the key {shown(key)}, which is no text")
            _check_text(field, key)
        return {str.__str__(key): _plain_json(field, item, depth - 1) for key, item in value.items()}
    raise RequestError(field, f"holds {shown(value)}, which JSON of 64-bit numbers cannot")


# What chooses among tokens otherwise than beams do.
_NOT_OF_BEAMS = (
    *("top_p", "top_k", "min_p", "stop", "include_stop_str_in_output", "min_tokens", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "structured"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Immutable; raises RequestError on any value out of range.

    temperature under 1e-5 is greedy. top_k 0 or -1 is off. Repetition penalty counts prompt and output, presence and
    frequency penalties count output only. max_tokens None means up to the context limit. `logprobs` N returns
    the chosen token's and the N best log-probs of the raw distribution at temperature 1 (0: the chosen only).

    structured ends the completion (FinishReason.STOP) with the token after which nothing more can follow, before
    min_tokens too; where the output may end or go on, the model's end-of-sequence token says so, which ignore_eos and
    min_tokens hold back. Other limits and stops end it where they fall, whole or not.
    """

    n: int = 1  # completions of the prompt
    temperature: float = 1.0  # logits are divided by it; under 1e-5: the most likely token
    top_p: float = 1.0  # sample among the most likely tokens that hold this probability together
    top_k: int = 0  # sample among so many most likely tokens; 0 or -1: all
    min_p: float = 0.0  # sample among tokens at least this times as likely as the most likely one
    seed: int | None = None  # the same seed gives the same completion
    stop: tuple[str, ...] = ()  # texts that end the completion
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the completion, beside the model's own
    include_stop_str_in_output: bool = False  # keep the stop text at the end
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    max_tokens: int | None = 16  # most output tokens; None: up to the context limit
    min_tokens: int = 0  # output tokens before which no stop counts
    logprobs: int | None = None  # log-probs of each output token and of so many best beside it
    prompt_logprobs: int | None = None  # the same of each prompt token
    repetition_penalty: float = 1.0  # logits of tokens seen in prompt or output are divided by it, times it if negative
    presence_penalty: float = 0.0  # subtracted from the logits of tokens seen in the output
    frequency_penalty: float = 0.0  # subtracted for each time a token was seen in the output
    logit_bias: Mapping[int, float] = field(default_factory=FrozenDict)  # added to the logits of these tokens
    allowed_token_ids: tuple[int, ...] | None = None  # only these are sampled
    banned_token_ids: tuple[int, ...] = ()  # these are never sampled
    skip_special_tokens: bool = True  # leave control tokens out of the text
    structured: StructuredOutput | None = None  # what the output must match
    use_beam_search: bool = False  # the n most likely completions that a search of n beams finds
    length_penalty: float = 1.0  # of beams: they are ranked by log-prob / (prompt and output tokens) ** length_penalty

    def __post_init__(self) -> None:
        _int("n", self.n, 1, MAX_N)
        _float("temperature", self.temperature, 0.0, 100.0)
        _float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p", "must be above 0, got 0.0")
        _int("top_k", self.top_k, -1, 2**31 - 1)
        _float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _int("seed", self.seed, -(2**63), MAX_SEED)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence):
            raise RequestError("stop", f"must be a string or a list of strings, got {shown(stop)}")
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError("stop", f"has {len(stop)} entries; at most {MAX_STOP_STRINGS} are accepted")
        for i, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop[{i}]", f"must be a string that is not empty, got {shown(text)}")
            if len(text) > MAX_STOP_STRING_CHARS:
                raise RequestError(f"stop[{i}]", f"has {len(text)} characters; at most {MAX_STOP_STRING_CHARS}")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise RequestError(f"stop[{i}]", f"holds half of a surrogate pair, which no output has: {shown(text)}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is above max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError("max_tokens", "is 0, which is allowed only with prompt_logprobs (scoring a prompt)")
        _float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias", f"must map token ids to numbers, got {shown(self.logit_bias)}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError("logit_bias", f"has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}")
        bias = {
            _int(f"logit_bias key {shown(k)}", k, 0, 2**31 - 1): _float(f"logit_bias[{k}]", v, -100.0, 100.0)
            for k, v in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", FrozenDict(bias))
        object.__setattr__(self, "banned_token_ids", _ids("banned_token_ids", self.banned_token_ids, MAX_TOKEN_LIST))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids, MAX_TOKEN_LIST)
            if not allowed:
                raise RequestError("allowed_token_ids", "is an empty list: no token could be chosen")
            if not set(allowed) - set(self.banned_token_ids):
                raise RequestError("allowed_token_ids", "are all banned by banned_token_ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError("structured", f"must be a StructuredOutput, got {shown(self.structured)}")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"must be true or false, got {shown(getattr(self, name))}")
        _float("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty != 1.0:
            raise RequestError("length_penalty", f"{self.length_penalty} is for beams: it needs use_beam_search=true")

    def _check_beam_search(self) -> None:
        if self.temperature not in (0.0, 1.0):
            raise RequestError(
                "temperature",
                f"{self.temperature} does not go with use_beam_search, whose log-probs are the model's own",
            )
        for name in _NOT_OF_BEAMS:
            value = getattr(self, name)
            is_off = not value or value == getattr(SamplingParams, name, None) or (name == "top_k" and value == -1)
            if not is_off:
                raise RequestError(name, f"{shown(value)} does not go with use_beam_search")
        if self.max_tokens == 0:
            raise RequestError("max_tokens", "is 0, and use_beam_search is for an output")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def uses_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def uses_bias(self) -> bool:
        return bool(self.logit_bias) or self.allowed_token_ids is not None or bool(self.banned_token_ids)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Settings of `LLM.beam_search`, under vLLM's names. Raises RequestError as SamplingParams does."""

    beam_width: int  # beams, and completions that are returned; half of the engine's max_logprobs at most
    max_tokens: int | None = 16  # most output tokens; None: up to the context limit
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    temperature: float = 0.0  # 0 or 1, which say the same: scores are the model's own log-probs
    length_penalty: float = 1.0  # the exponent of the length in a beam's score
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a beam, beside the model's own
    logprobs: int | None = None  # log-probs of each output token and of so many best beside it

    def sampling_params(self) -> SamplingParams:
        """The same as settings of a request."""
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, how urgently and within what: for the order of service, metrics, logs and traces; it alters no token.

    Raises RequestError.
    """

    tenant: str = DEFAULT_TENANT  # whom tokens and cost are counted for
    priority: int = 0  # lower is served first; which class it falls into, SchedulingConfig says
    deadline_s: float | None = None  # of the engine's clock: a request that has no slot by then ends
    operation: Literal["chat", "text_completion"] = "text_completion"
    trace: TraceContext | None = None  # the caller's span

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or not 1 <= len(self.tenant) <= MAX_TENANT_CHARS:
            raise RequestError(
                "tenant", f"must be a name of 1 to {MAX_TENANT_CHARS} characters, got {shown(self.tenant)}"
            )
        if not self.tenant.isascii() or not self.tenant.isprintable():
            raise RequestError("tenant", f"must be of printable ASCII characters, got {shown(self.tenant)}")
        _int("priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
        if self.deadline_s is not None:
            _float("deadline_s", self.deadline_s, -sys.float_info.max, sys.float_info.max)


@dataclass(kw_only=True, slots=True)
class Request:
    """One sequence to complete, on the host. The scheduler owns it from `add` until it is finished.

    `[0, num_computed_tokens)` have K/V in pages once every dispatched step
    has run; a request gets tokens until `num_computed_tokens` catches up with what it has.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int  # prompt + output bound: min(context, prompt + max_tokens)
    stop_token_ids: tuple[int, ...] = ()  # params.stop_token_ids plus the model's eos unless ignore_eos
    child_index: int = 0  # which of params.n
    seed: int = 0  # 64-bit; mixed with child_index on the host, with the position on the device
    context: RequestContext = RequestContext()
    cache_salt: bytes = b""  # requests of different salts never share pages through the prefix cache
    keeps_pages: bool = False  # ended by length, its pages stay until `Scheduler.release_pages`, for others to fork
    hashed_prompt: HashedPrompt | None = None  # by `Scheduler.hash_prompt`; None: a step hashes what it needs
    fork_of: Request | None = None  # one that keeps its pages, and of whose tokens only the last is not this one's too

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # includes tokens of steps dispatched and not yet read
    num_cached_tokens: int = 0  # of those, from a prefix hit at the first admission
    num_preemptions: int = 0
    rope_len: int = 0  # rope sees max(num_prompt_tokens, rope_len); longrope: tokens at the last long-regime restart
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it
    error: str | None = None

    # Of the engine's clock, in this order; None: not yet, or never. A token's time is that of reading its step.
    arrival_time_s: float = 0.0
    first_scheduled_time_s: float | None = None  # the first time it was given a slot
    first_token_time_s: float | None = None
    last_token_time_s: float | None = None
    finish_time_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def needs_last_token(self) -> bool:
        """Whether a token can be sampled only once the one before it is known on the host."""
        return self.params.structured is not None


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A chosen (or prompt) token's natural log-prob and the best ones, best first, as (token id, log-prob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(kw_only=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(kw_only=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
