"""Patterns, choices, grammars and tool calls; hostile ones; the cache; the vocabulary."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoints.gguf_reader import read_gguf
from serving.request import MAX_STRUCTURED_CHARS, NotNowError, RequestError, SamplingParams, StructuredOutput
from serving.structured.compiler import CompileLimits, GrammarCompiler
from serving.structured.constraint import Constraint
from serving.structured.grammar_worker import MAX_LEXER_STATES
from serving.structured.tool_calls import TaggedJson, tagged_json
from serving.structured.vocabulary import ModelTokenTable, make_library_tokenizer
from serving.text.tokenizer import load_tokenizer

DATA = Path(__file__).parents[2] / "data" / "tokenizers"
PATTERNS = [
    "a{1,10}b|[0-9]{3}",
    r"\d{4}-\d{2}-\d{2}",
    r"(yes|no)( please)?",
    r"[^\"\\]{1,4}",
    r"a/b\\c\n#\"",
    "^ab?$",
    r"[]x^-]{2}",
    r"(?i)abc",
    "é{2}😀+",
    r"(a*)*b",
    r".{0,5}",
]
CHOICES = ["yes", "no", 'q"\\/\n', "é😀", " a.b*c[d]{2}", "yes, but", "<|end|>", "\u2028\x00"]


def rng() -> random.Random:
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_their_pattern_from_start_to_end(compiler, random_text, pattern):
    draw = rng()
    grammar = compiler.compile(StructuredOutput.regex(pattern))
    for _ in range(10):
        text = random_text(grammar, draw)
        assert text is not None and re.fullmatch(pattern, text), text


def test_a_choice_gives_each_of_its_texts_and_nothing_else(compiler, random_text, follows):
    draw = rng()
    grammar = compiler.compile(StructuredOutput.choice(CHOICES))
    assert {random_text(grammar, draw) for _ in range(300)} == set(CHOICES)
    assert all(follows(grammar, text) for text in CHOICES)
    assert not follows(grammar, "yes, and")


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" NUM\nNUM: /[0-9]{2,4}/', 'root ::= "a" [0-9]{2,4}', '%llguidance {}\nstart: "a" /[0-9]{2,4}/'],
    ids=["lark", "gbnf", "marked as llguidance's"],
)
def test_grammars_of_both_notations(compiler, random_text, grammar):
    draw = rng()
    compiled = compiler.compile(StructuredOutput.grammar(grammar))
    for _ in range(10):
        assert re.fullmatch("a[0-9]{2,4}", random_text(compiled, draw))


def test_a_grammar_that_no_pattern_can_express(compiler, follows):
    grammar = compiler.compile(StructuredOutput.grammar('start: "(" start ")" | "x"'))
    assert follows(grammar, "((((x))))") and not follows(grammar, "((x)))")


BAD = [
    (StructuredOutput.regex("a**"), "repetition"),
    (StructuredOutput.regex("a++"), "repetition"),
    (StructuredOutput.regex("a{2}{3}"), "repetition"),
    (StructuredOutput.regex("["), "unclosed"),
    (StructuredOutput.regex("a)"), "unopened"),
    (StructuredOutput.regex(r"(a)\1"), "backreferences"),
    (StructuredOutput.regex("(?=a)a"), "look-around"),
    (StructuredOutput.regex(r"\ba"), "lookarounds"),
    (StructuredOutput.regex("(" * 5000 + "a" + ")" * 5000), "regex"),
    (StructuredOutput.regex("()"), "only the empty"),
    (StructuredOutput.regex("((a{1,100}){1,100}){1,100}"), "too many"),
    (StructuredOutput.choice([""]), "only the empty"),
    (StructuredOutput.grammar("start: missing"), "missing"),
    (StructuredOutput.grammar("nothing"), "Expected"),
    (StructuredOutput.grammar('begin: "a"'), "begin"),
    (StructuredOutput.grammar("start: a\na: b\nb: a"), "no text"),
    (StructuredOutput.grammar('start: <nope> "a"'), "nope"),
    (StructuredOutput.grammar("%import .other.X\nstart: X"), ".other.X"),
    (StructuredOutput.grammar('%llguidance {"no_forcing": false}\nstart: "a"'), "%llguidance"),
    (StructuredOutput.grammar("start: x\nx[temperature=0.5]: /a/"), "temperature"),
    (StructuredOutput.grammar('start: x "b"\nx[stop="b"]: /a*/'), "stop"),
    (StructuredOutput.grammar('start: %json {"not": {}}'), "not"),
    (StructuredOutput.grammar('start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "x-guidance"),
    (StructuredOutput.grammar('start: %json {"x-gu\\u0069dance": {"lenient": true}}'), "x-guidance"),
    (StructuredOutput.grammar('start: %json {"type": '), "%json"),
]


@pytest.mark.parametrize(("structured", "part"), BAD, ids=[f"{s.kind} {s.value[:30]}" for s, _ in BAD])
def test_what_is_wrong_or_too_much_is_refused(compiler, structured, part):
    with pytest.raises(RequestError) as refused:
        compiler.compile(structured)
    assert refused.value.field.startswith("structured") and part in str(refused.value)
    assert len(str(refused.value)) < 1000 and "no_forcing" not in str(refused.value)


def test_an_error_in_a_grammar_names_the_line_as_its_author_counts(compiler):
    with pytest.raises(RequestError, match=r"line 2: .*missing"):
        compiler.compile(StructuredOutput.grammar('start: "a" b\nb: missing'))


@pytest.mark.parametrize("piece", ["[", "%json", "%json ", "%llguidance {", "(", "{1", "a{1,", "\\", "stop=", "[stop "])
def test_the_longest_texts_of_one_piece_are_checked_and_refused(compiler, piece):
    for structured in (StructuredOutput.regex, StructuredOutput.grammar):
        text = piece * (MAX_STRUCTURED_CHARS // len(piece))
        with pytest.raises(RequestError):
            compiler.compile(structured(text if structured == StructuredOutput.grammar else text + "["))


@pytest.fixture
def new_compiler(tokenizer):
    made = []

    def make(**limits) -> GrammarCompiler:
        made.append(GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, CompileLimits(**limits)))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


SLOW = StructuredOutput.json_schema({"type": "integer", "multipleOf": 999983})
LARGE = StructuredOutput.json_schema({"enum": [f"value {i}" for i in range(10000)]})


def test_a_grammar_beyond_the_memory_limit_is_refused_and_the_next_one_served(new_compiler):
    compiler = new_compiler(max_memory_bytes=8 * 2**20, max_workers=1)
    with pytest.raises(RequestError, match="8 MiB"):
        compiler.compile(LARGE)
    assert compiler.compile(StructuredOutput.regex("a+"))


def test_while_one_grammar_takes_long_another_is_compiled(new_compiler):
    compiler = new_compiler(max_workers=2, max_memory_bytes=2**30)
    refused = []

    def compile_slow():
        with pytest.raises(RequestError, match="more than 2 s"):
            compiler.compile(SLOW)
        refused.append(SLOW)

    thread = threading.Thread(target=compile_slow)
    thread.start()
    assert compiler.compile(StructuredOutput.regex("a+")) and not refused
    thread.join()
    assert refused


def test_where_every_worker_is_busy_or_silent_a_request_may_be_served_later(new_compiler):
    compiler = new_compiler(max_workers=1, max_memory_bytes=2**30)
    compiler.compile(StructuredOutput.regex("a"))
    worker = compiler._workers.get_nowait()
    usual, compiler.limits = compiler.limits, CompileLimits(max_workers=1, max_wall_s=0.01)
    with pytest.raises(NotNowError, match="cannot be compiled now: others are"):
        compiler.compile(StructuredOutput.regex("b"))
    compiler.limits = usual
    worker._max_wall_s = 0.01
    compiler._workers.put(worker)
    with pytest.raises(NotNowError, match="cannot be compiled now: compiling took more than"):
        compiler.compile(SLOW)
    assert compiler.num_cached == 1  # neither is remembered as wrong
    assert compiler.compile(StructuredOutput.regex("b"))  # by a new worker


def test_a_worker_that_ended_is_replaced(new_compiler):
    compiler = new_compiler(max_workers=1)
    compiler.compile(StructuredOutput.regex("a"))
    worker = compiler._workers.get_nowait()
    worker._process.kill()
    compiler._workers.put(worker)
    with pytest.raises(NotNowError, match="cannot be compiled now"):
        compiler.compile(StructuredOutput.regex("b"))
    assert compiler.compile(StructuredOutput.regex("b"))


def test_the_cache_is_bounded_in_entries_and_bytes_and_keeps_the_last_used(new_compiler):
    compiler = new_compiler(max_cached=3)
    patterns = [StructuredOutput.regex(text) for text in "abcd"]
    first = [compiler.compile(pattern) for pattern in patterns[:3]]
    assert compiler.compile(patterns[0]) is first[0]
    compiler.compile(patterns[3])  # in place of b, the least recently used
    assert compiler.num_cached == 3 and compiler.compile(patterns[0]) is first[0]
    assert compiler.compile(patterns[1]) is not first[1]
    with pytest.raises(RequestError):
        compiler.compile(StructuredOutput.regex("["))
    assert compiler.num_cached == 3

    small = new_compiler(max_cached_bytes=2**20)
    for i in range(6):
        grammar = small.compile(StructuredOutput.json_schema({"enum": [f"{i} {k}" for k in range(2000)]}))
        assert grammar.num_bytes > 2**18
        assert small.num_cached_bytes <= max(2**20, grammar.num_bytes + len(grammar.structured.value))
    assert 1 <= small.num_cached < 6


def test_a_grammar_worn_out_by_one_request_is_compiled_anew_for_the_next(compiler):
    """Its states are those of the last 20 letters, more than are kept: that request fails, not the ones to come."""
    structured = StructuredOutput.regex("(a|b)*a(a|b){20}c")
    grammar, draw = compiler.compile(structured), rng()
    constraint = Constraint(grammar, SamplingParams(max_tokens=None), ())
    for _ in range(2 * MAX_LEXER_STATES):
        constraint.accept(draw.choice(b"ab"))
        constraint.find_mask()
        if constraint.error is not None:
            break
    assert "too many states" in constraint.error and not constraint.is_complete
    compiler.forget(grammar)
    fresh = Constraint(compiler.compile(structured), SamplingParams(max_tokens=None), ())
    assert fresh.error is None and fresh.mask.any()


# The vocabulary


@pytest.mark.parametrize("name", ["gpt-2", "phi-3"])
def test_llguidance_has_the_exact_bytes_of_each_token_of_a_real_vocabulary(name):
    tokenizer = load_tokenizer(read_gguf(DATA / f"ggml-vocab-{name}.gguf").metadata)
    vocab_size = tokenizer.vocab_size + 7  # rows that the tokenizer does not have
    table = ModelTokenTable(tokenizer, vocab_size, tokenizer.eos_token_ids)
    library = make_library_tokenizer(table)
    assert library.vocab_size == vocab_size and set(library.eos_tokens) == set(tokenizer.eos_token_ids)
    for token_id in [*range(300), *random.Random(1).sample(range(tokenizer.vocab_size), 300)]:
        if tokenizer.token_bytes(token_id) == b"\xff":
            continue  # it begins no UTF-8, and marks control tokens inside llguidance
        assert library.is_special_token(token_id) == (token_id in tokenizer.special_token_ids), token_id
        if token_id not in tokenizer.special_token_ids:
            assert library.decode_bytes([token_id]) == tokenizer.token_bytes(token_id)
    usable = np.unpackbits(table.usable.view(np.uint8), bitorder="little")
    assert not usable[tokenizer.vocab_size :].any()
    assert usable[: tokenizer.vocab_size].sum() >= tokenizer.vocab_size - 10


def test_a_grammar_over_all_tokens_leaves_out_rows_without_a_token(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutput.grammar("start: <[*]>*"))
    mask = Constraint(grammar, SamplingParams(max_tokens=None), ()).mask
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[: tokenizer.vocab_size].all() and not bits[tokenizer.vocab_size :].any()


def test_without_an_end_of_sequence_a_grammar_that_may_go_on_goes_on(tokenizer):
    compiler = GrammarCompiler(tokenizer, 288, ())  # a multiple of 32: the end of sequence made up is in a word more
    constraint = Constraint(compiler.compile(StructuredOutput.regex("ab?")), SamplingParams(max_tokens=None), ())
    constraint.accept(ord("a"))
    constraint.find_mask()
    bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [ord("b")] and not constraint.is_complete
    constraint.accept(ord("b"))
    assert constraint.is_complete
    compiler.close()


# Tool calls

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
TAGS = [
    TaggedJson(begin='<tool_call>{"name": "weather", "arguments": ', schema=CITY, end="}</tool_call>"),
    TaggedJson(begin='<tool_call>{"name": "é😀", "arguments": ', schema=True, end="}</tool_call>"),
]


def test_a_forced_call_is_one_of_the_tools_with_arguments_of_its_schema(compiler, tokenizer, random_text):
    draw = rng()
    grammar = compiler.compile(tagged_json(TAGS, tokenizer))
    names = set()
    for _ in range(60):
        text = random_text(grammar, draw)
        if text is None:
            continue
        call = json.loads(re.fullmatch(r"<tool_call>(.*)</tool_call>", text, re.DOTALL)[1])
        names.add(call["name"])
        if call["name"] == "weather":
            assert list(call["arguments"]) == ["city"] and len(call["arguments"]["city"]) <= 6
    assert names == {"weather", "é😀"}


def test_calls_are_counted_and_separated(compiler, tokenizer, follows):
    tags = [TaggedJson(begin="f(", schema={"type": "integer"}, end=")")]
    grammar = compiler.compile(tagged_json(tags, tokenizer, min_calls=2, max_calls=3, separator=";\n"))
    assert follows(grammar, "f(1);\nf(2);\nf(3)")
    assert not follows(grammar, "f(1);\nf(2);\nf(3);") and not follows(grammar, "f(1)f(2)")
    unbounded = compiler.compile(tagged_json(tags, tokenizer, max_calls=None))
    assert follows(unbounded, "f(1)" * 20)


def test_free_text_goes_on_until_the_trigger(compiler, tokenizer, follows):
    tags = [TaggedJson(begin="=" + name, schema={"type": "integer"}, end=";") for name in "fg"]
    grammar = compiler.compile(tagged_json(tags, tokenizer, min_calls=0, max_calls=None, trigger="="))
    assert follows(grammar, "any text\n é{") and follows(grammar, "text=f1; more text =g22;=f3;")
    assert not follows(grammar, "text =h") and not follows(grammar, "text=f{")


def test_a_control_token_as_the_trigger_is_that_token_and_not_its_text(compiler, tokenizer, follows):
    call_id = tokenizer.special_token_texts["<|call|>"]
    tags = [TaggedJson(begin="<|call|>f", schema=CITY)]
    grammar = compiler.compile(tagged_json(tags, tokenizer, trigger="<|call|>"))
    assert follows(grammar, "<|call|>g")  # free text
    constraint = Constraint(grammar, SamplingParams(max_tokens=None), ())
    for token_id in (*b"text", call_id, *b'f{"city":"Rome"'):
        constraint.accept(token_id)
    constraint.find_mask()
    assert constraint.error is None
    constraint.accept(ord("}"))
    constraint.find_mask()
    bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")
    assert all(bits[eos] for eos in tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_calls": 2}, "min_calls"),
        ({"min_calls": 0}, "min_calls"),
        ({"max_calls": 0, "min_calls": 0}, "min_calls"),
        ({"trigger": "f"}, "begin"),
        ({"trigger": ""}, "begin"),
        ({"trigger": "<tool_call>", "separator": " "}, "separator"),
        ({"trigger": "<tool_call>{<|call|>"}, "begin"),
    ],
)
def test_contradictions_of_a_tool_call_format_are_refused(tokenizer, options, field):
    with pytest.raises(RequestError) as refused:
        tagged_json(TAGS, tokenizer, **options)
    assert field in refused.value.field


def test_tool_schemas_are_checked_like_any_other(compiler, tokenizer):
    tags = [TaggedJson(begin="f", schema={"type": "object", "properties": {"a": {"not": {}}}})]
    with pytest.raises(RequestError, match="not"):
        compiler.compile(tagged_json(tags, tokenizer))
