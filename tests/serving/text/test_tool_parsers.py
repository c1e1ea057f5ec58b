"""Tool calls in output text: each format, however the text is cut, whatever is wrong with it."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.incremental_parser import MAX_HELD_CHARS
from serving.text.output_deltas import ContentDelta, ToolCallArguments, ToolCallStart, collect
from serving.text.tool_parsers import (
    TOOL_FORMATS,
    OutputParser,
    call_frame,
    detect_reasoning_format,
    detect_tool_format,
)
from serving.text.tools.harmony import HarmonyParser
from serving.text.tools.json_formats import HermesParser

TOOLS = ("get_weather", "search", "now")
DS = {
    "begin": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
    "call": "<｜tool▁call▁begin｜>",
    "sep": "<｜tool▁sep｜>",
    "done": "<｜tool▁call▁end｜>",
}
K2 = {
    "begin": "<|tool_calls_section_begin|>",
    "end": "<|tool_calls_section_end|>",
    "call": "<|tool_call_begin|>",
    "args": "<|tool_call_argument_begin|>",
    "done": "<|tool_call_end|>",
}
ASSISTANT = "<|start|>assistant"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"

# Braces, quotes, escapes, other writing systems, and the markers of every format, all inside string arguments.
HARD = json.dumps(
    {
        "query": 'a "b" {c} [d] }}]] \\ \n\t ünï 東京 \U0001f327 </tool_call> <|call|> <|end|> [TOOL_CALLS] '
        + DS["done"]
        + K2["done"],
        "nested": {"x": [{"y": []}, {}, [[1, -2.5e-3, True, None]]], "": "\\\\"},
    },
    ensure_ascii=False,
    indent=1,
)

# (format, output, content, calls)
SAMPLES = [
    ("hermes", "Nothing to call. <b>1 < 2</b> {}", "Nothing to call. <b>1 < 2</b> {}", []),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        "Let me look.\n",
        [("get_weather", '{"city": "Oslo", "days": 3}')],
    ),
    (
        "hermes",
        f'\n\n<tool_call>\n{{"name": "search", "arguments": {HARD}}}\n</tool_call>\n<tool_call>\n{{"arguments": '
        '{"zone": "UTC"}, "id": [1, "}"], "name": "now"}\n</tool_call>\nDone.',
        "Done.",
        [("search", HARD), ("now", '{"zone": "UTC"}')],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', None, [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [("now", "{}")]),
    (
        "hermes",  # two objects in one pair of tags
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "search", "arguments": { "q": "" } }\n</tool_call>',
        None,
        [("now", "{}"), ("search", '{ "q": "" }')],
    ),
    (
        "hermes",  # SmolLM2
        '<tool_call>[\n{"name": "get_weather", "arguments": {"city": "Oslo"}},\n{"name": "now", "arguments": {}}\n]</tool_call>',
        None,
        [("get_weather", '{"city": "Oslo"}'), ("now", "{}")],
    ),
    ("hermes", "<tool_call>[]</tool_call>", None, []),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        None,
        [("get_weather", '{"city": "Oslo"}')],
    ),
    (
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "search", "parameters": {HARD}}}; {{"name": "now", "parameters": {{}}}}',
        None,
        [("search", HARD), ("now", "{}")],
    ),
    ("llama3_json", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("llama3_json", '{"name": "now"}', '{"name": "now"}', []),  # JSON for the user, not a call
    ("llama3_json", 'Like {"name": "now", "parameters": {}}', 'Like {"name": "now", "parameters": {}}', []),
    (
        "mistral",
        f'Sure.[TOOL_CALLS] [{{"name": "search", "arguments": {HARD}}}, {{"name": "now", "arguments": {{}}}}]',
        "Sure.",
        [("search", HARD), ("now", "{}")],
    ),
    (
        "mistral_v11",
        f'[TOOL_CALLS]search[ARGS]{HARD}[TOOL_CALLS]now{{}}[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{{"city": "Rom"}}',
        None,
        [("search", HARD), ("now", "{}"), ("get_weather", '{"city": "Rom"}')],
    ),
    (
        "deepseek_v3",
        f"Looking.{DS['begin']}{DS['call']}function{DS['sep']}search\n```json\n{HARD}\n```{DS['done']}\n"
        f"{DS['call']}function{DS['sep']}now\n```json\n{{}}\n```{DS['done']}{DS['end']}",
        "Looking.",
        [("search", HARD), ("now", "{}")],
    ),
    (
        "deepseek_v31",
        f"{DS['begin']}{DS['call']}search{DS['sep']}{HARD}{DS['done']}{DS['call']}now{DS['sep']}{{}}{DS['done']}{DS['end']}",
        None,
        [("search", HARD), ("now", "{}")],
    ),
    (
        "kimi_k2",
        f"Well.{K2['begin']}{K2['call']}functions.search:0{K2['args']}{HARD}{K2['done']}"
        f"{K2['call']}functions.now:1 {K2['args']} {{}}{K2['done']}{K2['end']}",
        "Well.",
        [("search", HARD), ("now", "{}")],
    ),
    ("kimi_k2", K2["begin"] + K2["end"], None, []),
    (
        "phi",
        f'functools[{{"name": "search", "arguments": {HARD}}}, {{"name": "now", "arguments": {{}}}}]',
        None,
        [("search", HARD), ("now", "{}")],
    ),
    (
        "phi",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
        None,
        [("get_weather", '{"city": "Oslo"}')],
    ),
    ("phi", "import functools\nfunctools.cache", "import functools\nfunctools.cache", []),
    (
        "pythonic",
        "[get_weather(city='São \"Paulo\"', days=-3, f=1.5e3, ok=True, no=None), search(q=[{'a': [], \"b\": (false)}])]".replace(
            "(false)", "false"
        ),
        None,
        [
            ("get_weather", '{"city": "São \\"Paulo\\"", "days": -3, "f": 1.5e3, "ok": true, "no": null}'),
            ("search", '{"q": [{"a": [], "b": false}]}'),
        ],
    ),
    (
        "pythonic",
        '<|python_start|>[ now( ) , search(q="""a "quoted"\n\\t\\x41\\u00e9\\ud83d\\ude00\\d\\ud83d""", ), now(**{"z": 1}) ]<|python_end|>',
        None,
        [
            ("now", "{}"),
            ("search", json.dumps({"q": 'a "quoted"\n\tAé😀\\d\ufffd'}, ensure_ascii=False)),
            ("now", '{"z": 1}'),
        ],
    ),
    ("pythonic", '```tool_code\nget_weather(city="Oslo")\n```', None, [("get_weather", '{"city": "Oslo"}')]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[]", "[]", []),
    (
        "harmony",
        f"<|channel|>commentary<|message|>Looking.<|end|>{ASSISTANT}<|channel|>commentary to=functions.search "
        f"<|constrain|>json<|message|>{HARD}<|call|>",
        "Looking.",
        [("search", HARD)],
    ),
    (
        "harmony",
        f' to=functions.now<|channel|>commentary<|message|><|call|>{ASSISTANT}{TO_WEATHER}{{"city": "Oslo"}}<|call|>',
        None,
        [("now", "{}"), ("get_weather", '{"city": "Oslo"}')],
    ),
    ("harmony", "<|channel|>final<|message|>It is 1 < 2.<|return|>", "It is 1 < 2.", []),
    ("harmony", "No header at all", "No header at all", []),
]


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def deltas_of(tool_format, pieces, tools=TOOLS, **options):
    parser = OutputParser(tool_format=tool_format, tool_names=tools, **options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def check_order(deltas):
    """What a client relies on: a call's start first and once, indices from 0 on, then its arguments in one go."""
    current = -1
    ids = set()
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            assert delta.index == current + 1
            assert delta.type == "function"
            assert delta.call_id not in ids
            assert re.fullmatch(r"\S+", delta.call_id)
            ids.add(delta.call_id)
            current = delta.index
        else:
            assert delta.text
            if isinstance(delta, ToolCallArguments):
                assert delta.index == current


def parsed(tool_format, pieces, tools=TOOLS, **options):
    """Content, and the name and arguments of each call."""
    deltas = deltas_of(tool_format, pieces, tools, **options)
    check_order(deltas)
    output = collect(deltas)
    return output.content, [(call.name, call.arguments) for call in output.tool_calls]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), SAMPLES)
def test_each_format_gives_the_same_calls_for_every_cut_in_two_and_for_single_characters(
    tool_format, text, content, calls
):
    assert parsed(tool_format, [text]) == (content, calls)
    assert parsed(tool_format, list(text)) == (content, calls)
    for cut in range(1, len(text)):
        assert parsed(tool_format, in_pieces(text, [cut])) == (content, calls), cut
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), SAMPLES)
def test_output_cut_off_anywhere_gives_whole_calls_and_at_most_one_partial_one(tool_format, text, content, calls):
    for end in range(len(text)):
        cut_content, cut_calls = parsed(tool_format, [text[:end]])
        assert len(cut_calls) <= len(calls)
        assert cut_calls[:-1] == calls[: len(cut_calls)][:-1]
        if cut_calls:
            name, arguments = cut_calls[-1]
            assert name == calls[len(cut_calls) - 1][0]
            assert calls[len(cut_calls) - 1][1].startswith(arguments)
        elif tool_format != "harmony":  # the header of a message is no text
            assert (cut_content or "").strip() in (text[:end].strip(), (content or "").strip())


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_text_without_markers_is_content_to_the_character(tool_format):
    text = f" \n{HARD.replace('<', '«').replace('[TOOL_CALLS]', '')} functions, tool_call\n "
    if tool_format in ("llama3_json", "pythonic"):
        text = text.lstrip()
    assert parsed(tool_format, [text]) == (text, [])
    assert parsed(tool_format, list(text)) == (text, [])
    assert parsed(tool_format, [" \n"]) == (" \n", [])
    assert parsed(tool_format, []) == (None, [])


# What the property test strings together: markers, pieces of calls, and what is in neither.
FRAGMENTS = sorted(
    {
        *(mark for entry in TOOL_FORMATS.values() for marks in entry.marks for mark in marks),
        *(text for entry in (DS, K2) for text in entry.values()),
        *"{}[]()<>:,;\"'\\= \n",
        *("</tool_call>", "<|python_end|>", "<|/tool_call|>", "<|call|>", "<|end|>", "[CALL_ID]a", ASSISTANT),
        *(
            "[get_weather(city='a')",
            'functools[{"name": "now"',
            '<tool_call>{"name": "search", ',
            '"arguments": {"q": "',
        ),
        *('"name": "now"', '"arguments": {}', "now", "function", "functions.now:0", "```json\n", "```", TO_WEATHER),
        *(
            '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
            "null",
            "True",
            "-1.5",
            "**{",
            "é😀",
            "\\u00e9",
            "<",
        ),
    }
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.one_of(
        st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
        st.tuples(
            st.sampled_from([sample[1] for sample in SAMPLES]), st.sampled_from(FRAGMENTS), st.integers(0, 400)
        ).map(lambda drawn: drawn[0][: drawn[2]] + drawn[1] + drawn[0][drawn[2] :]),
    ),
    st.data(),
)
def test_the_joined_result_does_not_depend_on_how_the_text_is_cut(tool_format, text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    options = {
        "reasoning_format": data.draw(st.sampled_from([None, "think", "deepseek_r1"])),
        "end_texts": ("</tool_call>", "<|im_end|>", "<|eot_id|>"),
    }
    whole = collect(deltas_of(tool_format, [text], **options))
    for pieces in (in_pieces(text, cuts), list(text)):
        output = collect(deltas_of(tool_format, pieces, **options))
        assert (output.content, output.reasoning) == (whole.content, whole.reasoning)
        assert [(c.name, c.arguments) for c in output.tool_calls] == [(c.name, c.arguments) for c in whole.tool_calls]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), [sample for sample in SAMPLES if sample[3]])
def test_s09_the_first_delta_of_a_call_has_index_id_type_and_name_and_arguments_join_to_the_whole_reply(
    tool_format, text, content, calls
):
    deltas = deltas_of(tool_format, list(text))
    starts = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
    assert [(start.index, start.name, start.type) for start in starts] == [
        (index, name, "function") for index, (name, _) in enumerate(calls)
    ]
    whole = collect(deltas_of(tool_format, [text]))
    for start, call in zip(starts, whole.tool_calls, strict=True):
        fragments = [d.text for d in deltas if isinstance(d, ToolCallArguments) and d.index == start.index]
        assert "".join(fragments) == call.arguments
        assert start.call_id


def test_s23_completions_of_one_request_share_neither_ids_nor_state():
    text = next(sample[1] for sample in SAMPLES if sample[0] == "hermes" and len(sample[3]) == 2)
    parsers = [OutputParser(tool_format="hermes", tool_names=TOOLS) for _ in range(4)]
    deltas = [[] for _ in parsers]
    for character in text:
        for parser, into in zip(parsers, deltas, strict=True):
            into += parser.feed(character)
    outputs = [collect(into + parser.finish()) for parser, into in zip(parsers, deltas, strict=True)]
    assert len({call.call_id for output in outputs for call in output.tool_calls}) == 8
    assert len({tuple(call.arguments for call in output.tool_calls) for output in outputs}) == 1


def test_arguments_are_given_out_as_they_come():
    parser = OutputParser(tool_format="hermes", tool_names=TOOLS)
    assert parser.feed('<tool_call>{"name": "search", "arguments": {') == []
    start, first = parser.feed('"q": "one')
    assert (start.name, first) == ("search", ToolCallArguments(0, '{"q": "one'))
    assert parser.feed(" two") == [ToolCallArguments(0, " two")]
    assert parser.feed('"}}</tool') == [ToolCallArguments(0, '"}')]
    assert parser.feed("_call>") == []
    assert parser.finish() == []


def test_no_character_of_a_marker_appears_before_it_is_decided():
    parser = OutputParser(tool_format="hermes", tool_names=TOOLS)
    assert parser.feed("a <tool") == [ContentDelta("a ")]
    assert parser.feed("_ca") == []
    assert parser.feed("t>") == [ContentDelta("<tool_cat>")]
    assert parser.feed("<") == []
    assert parser.finish() == [ContentDelta("<")]


MALFORMED = [
    ("hermes", "<tool_call>get_weather</tool_call>"),
    ("hermes", '<tool_call>{"name": get_weather, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now" "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {\'a\': 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "no\nw", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "</tool_call><tool_call"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS][{"name": "now"'),
    ("mistral", "[TOOL_CALLS]now: {}"),
    ("mistral", "[TOOL_CALLS]now[CALL_ID][ARGS]{}"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", '<|python_tag|>{"parameters": {}}'),
    ("deepseek_v3", f"{DS['begin']}now{DS['call']}"),
    ("deepseek_v3", f"{DS['begin']}{DS['call']}now{DS['sep']}nothing{DS['done']}{DS['end']}"),
    ("kimi_k2", f"{K2['begin']}{K2['call']}now{K2['args']}{{}}{K2['done']}{K2['end']}"),
    ("phi", "functools[now]"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(a=1, a=2)]"),
    ("pythonic", "[now(a=1 b=2)]"),
    ("pythonic", "[now(a=open('x'))]"),
    ("pythonic", "[now(a=__import__('os'))]"),
    ("pythonic", "[now(a=1_000)]"),
    ("pythonic", "[now(a={1: 2})]"),
    ("pythonic", "[now(a=[1,,2])]"),
    ("pythonic", "[now(a=" + "[" * 100 + "]" * 100 + ")]"),
    ("pythonic", "[now(a='unclosed)]"),
    ("pythonic", "[now.x()]"),
]


@pytest.mark.parametrize(("tool_format", "text"), MALFORMED)
def test_a_malformed_call_is_content_as_it_was_written(tool_format, text):
    for pieces in ([text], list(text)):
        assert parsed(tool_format, pieces) == (text, [])
    assert parsed(tool_format, [f"Hm: {text} Right."]) == (f"Hm: {text} Right.", [])


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        # A fault after the arguments have begun: the call stands, as far as it goes.
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>.', ".", [("now", '{"a": 1,}')]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call>.', ".", [("now", '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>.', ".", [("now", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}} oh', "oh", [("now", "{}")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, x}</tool_call>', ", x}</tool_call>", [("now", "{}")]),
        # The end of the output where a call is whole, and inside the head of another one.
        ("hermes", 'a <tool_call>{"name": "now", "arguments": {}}\n</tool_c', "a ", [("now", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "now"},', None, [("now", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "now"}, {"na', ', {"na', [("now", "{}")]),
        ("pythonic", "[now(), ", None, [("now", "{}")]),
        ("pythonic", "[now(), se", ", se", [("now", "{}")]),
        # White space beside calls.
        ("hermes", ' \n<tool_call>{"name": "now"}</tool_call> a \n', "a \n", [("now", "{}")]),
        ("hermes", 'a<tool_call>{"name": "now"}</tool_call> b', "a b", [("now", "{}")]),
        ("hermes", 'a<tool_call>{"name": "now"} b', "a b", [("now", "{}")]),
        ("hermes", 'a<tool_call>{"name": "now"}</tool_call> \n', "a", [("now", "{}")]),
        # A fault in the second call leaves the first.
        ("mistral", '[TOOL_CALLS][{"name": "now"}, {"name": 1}]', ', {"name": 1}]', [("now", "{}")]),
        ("pythonic", "[now(), search(q=x)]", ", search(q=x)]", [("now", "{}")]),
        # And the next marker begins a call again.
        ("hermes", '<tool_call>oops<tool_call>{"name": "now"}</tool_call>', "<tool_call>oops", [("now", "{}")]),
        ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', "<tool_call>", [("now", "{}")]),
        (
            "deepseek_v3",
            f"{DS['call']}function{DS['sep']}now\n```json\n{{}}\n``` so{DS['end']}",
            f"so{DS['end']}",
            [("now", "{}")],
        ),
        (
            "kimi_k2",
            f"{K2['call']}functions.now:0{K2['args']}{{}}{K2['call']}functions.now:1{K2['args']}{{}}{K2['end']}",
            None,
            [("now", "{}"), ("now", "{}")],
        ),
        ("harmony", f"<|channel|>analysis<|end|>{ASSISTANT}<|channel|>final<|message|>a", "<|channel|>analysis\na", []),
        ("harmony", f"{TO_WEATHER}in words<|call|>{ASSISTANT}<|channel|>final<|message|>a", "in words\na", []),
        ("harmony", f"{TO_WEATHER}{{}} and words<|call|>", "and words", [("get_weather", "{}")]),
    ],
)
def test_what_is_whole_is_a_call_and_the_rest_is_content(tool_format, text, content, calls):
    for pieces in ([text], list(text)):
        assert parsed(tool_format, pieces) == (content, calls)


def test_a_name_that_is_no_tool_of_the_request_is_content():
    text = (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    assert parsed("hermes", [text]) == ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', [("now", "{}")])
    for tool_format, sample, _, _ in SAMPLES:
        if tool_format == "harmony":  # the channels are no text
            assert parsed("harmony", [sample], tools=())[1] == []
        else:
            assert parsed(tool_format, [sample], tools=()) == (sample, [])


def test_ids_are_the_models_own_where_it_needs_them_again():
    sample = next(text for name, text, _, calls in SAMPLES if name == "kimi_k2" and calls)
    ids = [call.call_id for call in collect(deltas_of("kimi_k2", [sample])).tool_calls]
    assert ids == ["functions.search:0", "functions.now:1"]
    sample = next(text for name, text, _, _ in SAMPLES if name == "mistral_v11")
    ids = [call.call_id for call in collect(deltas_of("mistral_v11", [sample])).tool_calls]
    assert ids[2] == "a1B2c3D4e"
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) for call_id in ids)
    twice = f"{K2['call']}functions.now:0{K2['args']}{{}}{K2['done']}" * 2
    check_order(deltas_of("kimi_k2", [twice]))


def test_the_end_of_turn_token_that_ends_the_output_is_left_out():
    ends = ("<|im_end|>", "<|endoftext|>")
    for pieces in (["hello<|im_end|>"], list("hello<|im_end|>")):
        assert parsed("hermes", pieces, end_texts=ends) == ("hello", [])
    assert parsed("hermes", ["a<|im_end|>b<|im_"], end_texts=ends) == ("a<|im_end|>b<|im_", [])
    assert parsed("hermes", ['<tool_call>{"name": "now"}</tool_call><|im_end|>'], end_texts=ends) == (
        None,
        [("now", "{}")],
    )


class CountingText(str):
    """A text that counts the characters copied out of it."""

    num_copied = 0

    def __getitem__(self, key):
        piece = str.__getitem__(self, key)
        CountingText.num_copied += len(piece)
        return piece


HOSTILE = [
    *((name, unit) for name in TOOL_FORMATS for unit in ("<", "{", "[", "\\", '"', " ", "[[[[{{")),
    *((name, mark) for name, entry in TOOL_FORMATS.items() for marks in entry.marks for mark in marks),
    *((name, text) for name, text, _, _ in SAMPLES if len(text) < 150),
    *(("hermes", f"<tool_call>{text}") for text in ('{"x":[', '{"name":"now","arguments":{"', '{"name":"', "   " * 99)),
    *(("kimi_k2", K2["call"] + text) for text in ("", f"functions.now:0{K2['args']}{{", "<|")),
    *(("pythonic", text) for text in ("[now(a=", '```tool_code[now(a="""', "<|python_start|>[now(a=[[", "[now(a='\\u")),
    *(("harmony", text) for text in ("<|channel|>x to=", TO_WEATHER + "{", TO_WEATHER + '{"', "<|message|>")),
]


@pytest.mark.parametrize(("tool_format", "unit"), HOSTILE)
def test_work_and_held_text_stay_in_proportion_on_hostile_text(tool_format, unit):
    num_chars = 2**14
    text = (unit * (num_chars // len(unit) + 1))[:num_chars]
    parser = TOOL_FORMATS[tool_format].parser(frozenset(TOOLS))
    CountingText.num_copied = 0
    parser._text = CountingText(text)
    whole = collect(parser.finish())
    # A marker has at most 28 characters, and few places look for one; a copy of the rest at each marker would be 100s.
    assert CountingText.num_copied <= 150 * num_chars

    parser = TOOL_FORMATS[tool_format].parser(frozenset(TOOLS))
    deltas = []
    for character in text:
        deltas += parser.feed(character)
        assert len(parser._text) <= 32  # all that is looked at again
    output = collect(deltas + parser.finish())
    assert output.content == whole.content
    assert [call.arguments for call in output.tool_calls] == [call.arguments for call in whole.tool_calls]


@pytest.mark.parametrize("cut", [1000, MAX_HELD_CHARS, 2**20])
def test_a_megabyte_of_undecided_text_is_given_out_at_the_limit(cut):
    for tool_format, text in (
        ("hermes", "<tool_call>" + " " * 2**20),
        ("hermes", " " * 2**20 + "x"),
        ("hermes", '<tool_call>{"x": "' + "<tool_call>" * 2**16),
        ("llama3_json", '{"' + "a" * 2**20),
        ("pythonic", '[now(a="' + "b" * 2**20 + '")]'),
    ):
        parser = OutputParser(tool_format=tool_format, tool_names=TOOLS)
        released = 0
        deltas = []
        for start in range(0, len(text), cut):
            deltas += parser.feed(text[start : start + cut])
            released = sum(len(delta.text) for delta in deltas)
            assert min(start + cut, len(text)) - released <= MAX_HELD_CHARS
        assert collect(deltas + parser.finish()).content == text


def test_nesting_costs_no_stack():
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    text = f'<tool_call>{{"name": "search", "arguments": {deep}}}</tool_call>'
    assert parsed("hermes", [text]) == (None, [("search", deep)])
    assert parsed("pythonic", [f"[search(a={'[' * 100_000}"]) == (f"[search(a={'[' * 100_000}", [])


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=9), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), JSON_VALUES, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(ARGUMENTS, min_size=1, max_size=3), st.data())
def test_a_forced_call_is_read_as_that_call(tool_format, arguments, data):
    frame = call_frame(tool_format, [("get_weather", WEATHER), ("now", None)])
    assert [(call.name, call.schema) for call in frame.calls] == [("get_weather", WEATHER), ("now", {"type": "object"})]
    if frame.separator is None:
        del arguments[1:]
    chosen = [data.draw(st.sampled_from(frame.calls)) for _ in arguments]
    written = [
        json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 2])))
        for value in arguments
    ]
    body = (frame.separator or "").join(
        call.prefix + text + call.suffix for call, text in zip(chosen, written, strict=True)
    )
    content, calls = parsed(tool_format, [frame.begin + body + frame.end])
    assert content is None
    assert [name for name, _ in calls] == [call.name for call in chosen]
    assert [json.loads(text) for _, text in calls] == arguments
    if tool_format != "pythonic":
        assert [text for _, text in calls] == written


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TOOLS), ARGUMENTS), min_size=1, max_size=3))
def test_python_literals_become_the_json_of_the_same_values(calls):
    text = ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
    content, read = parsed("pythonic", [f"[{text}]"])
    assert content is None
    assert [(name, json.loads(arguments)) for name, arguments in read] == calls


def test_a_frame_refuses_names_that_would_break_out_of_it():
    for name in ("", 'a"b', "a b", "</tool_call>", "a\n", "é"):
        with pytest.raises(ValueError, match="a tool's name"):
            call_frame("hermes", [(name, None)])
    with pytest.raises(KeyError):
        call_frame("unknown", [("now", None)])


@pytest.mark.parametrize(
    ("template", "model_type", "tool_format", "reasoning_format"),
    [
        (None, None, None, None),
        ("{{ messages }}", "qwen3", None, None),
        ("{% if tools %}{{ '<tool_call>' }}{% endif %}{{ '</think>' }}", "qwen3", "hermes", "think"),
        ("{% if tools %}Environment: ipython <|python_tag|>", "llama", "llama3_json", None),
        (
            'tools {"name": function name, "parameters": dictionary of argument name and its value}',
            None,
            "llama3_json",
            None,
        ),
        ("tools [func_name1(params_name1=params_value1)]", "llama", "pythonic", None),
        ("tools [TOOL_CALLS][", "mistral", "mistral", None),
        ("tools [TOOL_CALLS]x[ARGS]", "mistral", "mistral_v11", None),
        (f"tools <｜Assistant｜>{DS['begin']}</think>", "deepseek_v3", "deepseek_v3", "deepseek_r1"),
        (f"tools <｜Assistant｜>{DS['begin']}</think> if thinking", "deepseek_v3", "deepseek_v31", "think"),
        (f"tools {K2['begin']}", "kimi_k2", "kimi_k2", None),
        ("tools <|start|><|channel|><|message|>", "gpt_oss", "harmony", "harmony"),
        ("tools <|tool|>", "phi3", "phi", None),
        ("tools <tool_call><function=x>", "qwen3_moe", None, None),  # Qwen3-Coder
        ("for tool in tools", "qwen2", "hermes", None),
        ("for tool in tools", "other", None, None),
        (None, "gpt_oss", "harmony", None),
    ],
)
def test_the_format_follows_from_the_template_and_else_from_the_model(
    template, model_type, tool_format, reasoning_format
):
    assert detect_tool_format(template, model_type) == tool_format
    assert detect_reasoning_format(template) == reasoning_format


def test_unknown_formats_are_refused():
    with pytest.raises(KeyError):
        OutputParser(tool_format="xml", tool_names=TOOLS)
    with pytest.raises(ValueError, match="reasoning_format"):
        OutputParser(reasoning_format="xml")


def test_parsers_of_one_format_hold_nothing_in_common():
    first, second = HermesParser(frozenset(TOOLS)), HermesParser(frozenset(TOOLS))
    first.feed("<tool_call>{")
    assert second.feed("x") == [ContentDelta("x")]
    assert HarmonyParser(frozenset()).finish() == []
