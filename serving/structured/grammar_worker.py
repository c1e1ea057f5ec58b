"""A process that tries grammars for `serving.structured.compiler`, within limits the system enforces.

Grammars come with requests. llguidance bounds most of its work, not all of it: a schema of a few bytes can take seconds
and hundreds of megabytes. Each grammar is compiled and run for some tokens in a fork of its own, which the CPU-time and
address-space limits end whatever it is doing. Imports the standard library and llguidance only.

Frames on both pipes are those of `serving.text.render_worker`. First comes the vocabulary {"tokens": [hex], "special":
[ids], "eos": [ids]}, answered by {}; then each {"kind": ..., "value": ...} is answered by {"grammar": in Lark's form,
"num_bytes": memory it took} or {"error": message}.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
from typing import Any

from serving.text.render_worker import encode_frame, read_frame

MAX_MESSAGE_CHARS = 500  # of an error
NUM_PROBE_TOKENS = 32
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each (llguidance's LLParserLimits); shared by all requests of a grammar
# Where only one text can follow, llguidance would tokenise all of it at every token, in the model's own way, and allow only
# the first token of that: a second a step for a constant of a megabyte. So the model chooses among all tokens that fit.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
MAX_ITEMS_IN_ROW = 20_000  # about four for each optional property of an object
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"  # bounded: a model may otherwise write blanks for ever
JSON_IN_GRAMMAR = re.compile(r"%json\s*\{(?=\s*(\})?)")


class TokenTable:
    """The vocabulary as `llguidance.LLTokenizer` wants it (its TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_ids: list[int]):
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_ids[0]
        self.greedy: Any = None

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of `text`. llguidance wants it and does not use it under `no_forcing`."""
        token_ids: list[int] = self.greedy(text)
        return token_ids


def make_tokenizer(table: TokenTable, eos_token_ids: list[int]) -> Any:
    import llguidance

    wrapper: Any = table
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(table.tokens), eos_token=eos_token_ids)
    table.greedy = tokenizer.greedy_tokenize
    return tokenizer


def make_matcher(tokenizer: Any, grammar: str) -> Any:
    """A matcher of a grammar that `to_grammar` made. Does not raise: `is_error` tells."""
    import llguidance

    limits = llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False
    )
    return llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)


def to_grammar(kind: str, value: str) -> str:
    """A StructuredOutput in llguidance's dialect of Lark. Raises ValueError."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    if kind in ("json_schema", "json_object"):
        schema = json.loads(value) if kind == "json_schema" else {"type": "object"}
        if isinstance(schema, bool):  # options go into an object
            schema = {"anyOf": [schema]}
        text = json.dumps(schema).replace("%", r"\u0025")  # a "%json {" in a string of it is none of the grammar's
        return NO_FORCING + _with_options(f"start: %json {text}")
    if kind == "grammar":
        return NO_FORCING + _with_options(any_to_lark(value))
    pattern = value if kind == "regex" else "|".join(map(_literal, json.loads(value)))
    # \d is an ASCII digit, as in JSON Schema
    return f"{NO_FORCING}start: /{llguidance.regex_to_lark(pattern, 'd')}/"


def _with_options(lark: str) -> str:
    """Our options in each schema of a grammar; none has its own (`schema_check`)."""
    options = '"x-guidance":' + json.dumps({"whitespace_pattern": JSON_SPACE})
    return JSON_IN_GRAMMAR.sub(lambda match: match[0] + options + ("" if match[1] else ","), lark)


def _literal(text: str) -> str:
    return "".join(c if c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


def token_ids_of(mask: bytes) -> list[int]:
    """Ids whose bits are set, lowest first in each byte."""
    return [8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def try_grammar(tokenizer: Any, kind: str, value: str, eos_token_ids: list[int]) -> dict[str, Any]:
    before_bytes = _resident_bytes()
    try:
        grammar = to_grammar(kind, value)
    except Exception as error:  # the converters raise what they like
        return {"error": str(error)}
    matcher = make_matcher(tokenizer, grammar)
    draw = random.Random(0)
    for i in range(NUM_PROBE_TOKENS):
        if matcher.is_error():
            return {"error": _reason(matcher.get_error(), kind)}
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return {"error": _reason(matcher.get_error(), kind)}
        token_ids = set(token_ids_of(mask)).difference(eos_token_ids)
        if not token_ids:
            if i == 0:
                return {"error": "matches no text, or only the empty one"}
            break
        matcher.consume_token(draw.choice(sorted(token_ids)))
    return {"grammar": grammar, "num_bytes": max(_resident_bytes() - before_bytes, 0) + len(grammar)}


# Where llguidance's message does not name the keyword.
_KEYWORDS = (
    (r"(?=Resource '|Anchor '|Pointer '|circular references )", "$ref: "),
    (r"patternProperty regexes", "patternProperties: regexes"),
    (r"(?=regex parse error|lookarounds not supported)", "pattern: "),
    (r"anyOf is empty", "anyOf or enum is empty"),
)


def _reason(error: str, kind: str) -> str:
    """llguidance's message without its state and its excerpt, and places only in a grammar that the client wrote."""

    def place(match: re.Match[str]) -> str:
        return f"line {int(match[1]) - NO_FORCING.count(chr(10))}: " if kind == "grammar" else ""

    reason = re.sub(r"^(?:at )?(\d+)\(\d+\): ", place, re.split(r"\n<|\n +1 \| ", error, maxsplit=1)[0].strip())
    if "oneOf constraints are not supported" in reason:  # it goes on to recommend an option of its own
        return "oneOf is supported only where it is plain that no value matches two of its schemas: use anyOf"
    if "Regex is empty" in reason:
        return "pattern, format, minLength and maxLength together allow no text"
    for found, named in _KEYWORDS:
        reason = re.sub(found, named, reason, count=1)
    return "matches no text that ends" if reason.startswith("NoExtensionBias") else reason


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _in_fork(tokenizer: Any, request: dict[str, Any], eos_token_ids: list[int], settings: dict[str, Any]) -> bytes:
    """The answer to a request, as a frame, from a process of its own."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(source)
            limit = _address_space_bytes() + settings["max_memory_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            signal.setitimer(signal.ITIMER_PROF, settings["max_cpu_s"])
            answer = try_grammar(tokenizer, request["kind"], request["value"], eos_token_ids)
            if "error" in answer:
                answer = {"error": answer["error"][:MAX_MESSAGE_CHARS]}
            with open(target, "wb") as pipe:
                pipe.write(encode_frame(answer))
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(target)
    with open(source, "rb") as pipe:
        frame = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return encode_frame({"error": f"takes more than {settings['max_cpu_s']:g} s to compile"})
    if status != 0 or not frame:
        mebibytes = settings["max_memory_bytes"] // 2**20
        return encode_frame({"error": f"cannot be compiled in {mebibytes} MiB"})
    return frame


def main() -> None:
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = read_frame(requests)
    if vocabulary is None:
        return
    table = TokenTable([bytes.fromhex(text) for text in vocabulary["tokens"]], vocabulary["special"], vocabulary["eos"])
    tokenizer = make_tokenizer(table, vocabulary["eos"])
    frame = encode_frame({})
    while True:
        answers.write(frame)
        answers.flush()
        request = read_frame(requests)
        if request is None:
            return
        frame = _in_fork(tokenizer, request, vocabulary["eos"], settings)
