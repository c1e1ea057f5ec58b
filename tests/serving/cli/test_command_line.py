"""The `headrace` command, driven through `main` with an LLM that needs no model."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import stat
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from checkpoints.errors import CheckpointError
from configs.engine import EngineConfig, MeshConfig
from configs.run import RunConfig
from configs.scheduling import SchedulingConfig
from serving.__main__ import main
from serving.cli.flags import field_comments, given_fields
from serving.cli.parser import build_parser
from serving.request import (
    CompletionOutput,
    FinishReason,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
)
from serving.text.base import TokenizerError


class EchoLLM:
    """Stands in for serving.llm.LLM: answers a prompt with its own characters, the last first."""

    made: ClassVar[list[EchoLLM]] = []

    def __init__(
        self, model: str, *, engine_config: EngineConfig, mesh_config: MeshConfig, scheduling_config: SchedulingConfig
    ):
        self.model, self.engine_config, self.mesh_config = model, engine_config, mesh_config
        self.scheduling_config = scheduling_config
        self.calls: list[tuple[dict[str, Any], SamplingParams]] = []
        EchoLLM.made.append(self)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        return SamplingParams(**{"top_p": 0.75, **given})

    def generate(
        self, prompts: list[dict[str, Any]], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        self.calls += zip(prompts, params, strict=True)
        for index, prompt in enumerate(prompts):
            if "too long" in str(prompt):
                raise RequestError(f"prompts[{index}].prompt", "has 9 tokens; the context holds 8")
        return [self._answer(prompt, settings) for prompt, settings in zip(prompts, params, strict=True)]

    def _answer(self, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        (value,) = prompt.values()
        if "messages" in prompt:
            value = value[-1]["content"]
        ids = [ord(c) for c in value] if isinstance(value, str) else value
        reply = ids[::-1][: params.max_tokens]
        top = tuple((token_id, -0.5) for token_id in reply[: params.logprobs])
        logprobs = [TokenLogprob(token_id=i, logprob=-0.5, top=top) for i in reply]
        failed = "fail" in str(value)
        completions = [
            CompletionOutput(
                index=index,
                text="".join(map(chr, reply)),
                token_ids=reply,
                logprobs=None if params.logprobs is None else logprobs,
                finish_reason=FinishReason.ERROR if failed else FinishReason.LENGTH,
                error="broke down" if failed else None,
            )
            for index in range(params.n)
        ]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(TokenLogprob(token_id=i, logprob=-1.0) for i in ids[1:])]
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=tuple(ids),
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=True,
            metrics={"arrival_time_s": 1.0, "first_token_time_s": 1.25},
        )

    def stats(self) -> dict[str, Any]:
        return {"num_requests": len(self.calls)}


@pytest.fixture(autouse=True)
def no_llm_yet():
    EchoLLM.made.clear()


def run(*argv: str) -> int:
    return main(argv, llm_factory=EchoLLM)


def prompts_file(tmp_path, *lines: Any) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def assert_refused(capsys, status: int, *parts: str) -> None:
    """Exit status 2, one line on stderr with `parts` in it, no traceback, and no engine built."""
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith("headrace: error: ") and captured.err.count("\n") == 1, captured.err
    assert [part for part in parts if part not in captured.err] == [], captured.err
    assert captured.out == ""
    assert EchoLLM.made == []


def test_one_prompt_is_answered_on_the_screen_with_totals_beside(capsys):
    assert run("generate", "--model", "m", "--prompt", "abc", "--print_stats") == 0
    captured = capsys.readouterr()
    assert captured.out == "> abc\ncba\n\n"
    assert captured.err.startswith("settings beside the defaults: RunConfig.model = 'm'\n")
    assert "1 prompts, 3 prompt tokens, 3 output tokens in " in captured.err
    assert "first token after 0.25 s (median)" in captured.err
    assert "num_requests" in captured.err


def test_every_prompt_form_is_answered_in_input_order(tmp_path):
    file = prompts_file(
        tmp_path,
        {"messages": [{"role": "user", "content": "xyz"}]},
        {"prompt": "abc", "max_tokens": 2, "logprobs": 1},
        "",
        {"prompt_token_ids": [104, 105], "prompt_logprobs": 0},
    )
    output = tmp_path / "out.jsonl"
    assert run("generate", "--model", "m", "--prompts_file", file, "--output", str(output), "--max_tokens", "8") == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert records == [
        {
            "prompt_token_ids": [120, 121, 122],
            "token_ids": [122, 121, 120],
            "text": "zyx",
            "finish_reason": "length",
            "logprobs": None,
        },
        {
            "prompt_token_ids": [97, 98, 99],
            "token_ids": [99, 98],
            "text": "cb",
            "finish_reason": "length",
            "logprobs": [
                {"token_id": 99, "logprob": -0.5, "top": [[99, -0.5]]},
                {"token_id": 98, "logprob": -0.5, "top": [[99, -0.5]]},
            ],
        },
        {
            "prompt_token_ids": [104, 105],
            "token_ids": [105, 104],
            "text": "ih",
            "finish_reason": "length",
            "logprobs": None,
            "prompt_logprobs": [None, {"token_id": 105, "logprob": -1.0, "top": []}],
        },
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_several_completions_of_a_prompt_stand_in_a_list(tmp_path):
    output = tmp_path / "out.jsonl"
    assert run("generate", "--model", "m", "--prompt", "ab", "--n", "2", "--output", str(output)) == 0
    record = json.loads(output.read_text())
    assert [completion["text"] for completion in record["outputs"]] == ["ba", "ba"]
    assert set(record) == {"prompt_token_ids", "outputs"}


def test_a_line_wins_over_a_flag_and_a_flag_over_the_models_default(tmp_path):
    file = prompts_file(tmp_path, {"prompt": "a", "seed": 5, "stop": ["x"]}, {"prompt": "b", "top_p": 0.5})
    flags = ["--temperature", "0.25", "--seed", "4", "--stop", "y", "--stop", "z", "--logit_bias", "5:1.5,7:-2"]
    assert run("generate", "--model", "m", "--prompts_file", file, *flags) == 0
    (llm,) = EchoLLM.made
    shared = SamplingParams(temperature=0.25, logit_bias={5: 1.5, 7: -2.0}, top_p=0.75, seed=4, stop=("y", "z"))
    assert [params for _, params in llm.calls] == [
        dataclasses.replace(shared, seed=5, stop=("x",)),
        dataclasses.replace(shared, top_p=0.5),
    ]


def test_logit_bias_of_a_line_has_its_keys_as_json_must_write_them(tmp_path):
    file = prompts_file(tmp_path, {"prompt": "a", "logit_bias": {"17": -1}})
    assert run("generate", "--model", "m", "--prompts_file", file) == 0
    assert EchoLLM.made[0].calls[0][1].logit_bias == {17: -1.0}


def test_a_line_of_many_keys_is_read_in_one_pass(tmp_path):
    """80,000 keys: a check of each against each would take minutes."""
    extra = {str(number): number for number in range(80_000)}
    message = {"role": "user", "content": "a", "extra": extra}
    file = prompts_file(tmp_path, {"messages": [message]})
    assert run("generate", "--model", "m", "--prompts_file", file) == 0
    assert EchoLLM.made[0].calls[0][0] == {"messages": [message]}


def test_half_of_a_surrogate_pair_is_printed_as_an_escape_and_loses_no_answer(capsys, tmp_path):
    file = prompts_file(tmp_path, '{"prompt": "Water \\ud800"}', {"prompt": "good"})
    assert run("generate", "--model", "m", "--prompts_file", file) == 0
    assert capsys.readouterr().out == "> Water \\ud800\n\\ud800 retaW\n\n> good\ndoog\n\n"
    output = tmp_path / "out.jsonl"
    assert run("generate", "--model", "m", "--prompts_file", file, "--output", str(output)) == 0
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["\ud800 retaW", "doog"]


def test_answers_that_the_terminal_cannot_spell_are_escaped(capsys, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert run("generate", "--model", "m", "--prompt", "aé") == 0
    screen.flush()
    assert screen.buffer.getvalue() == b"> a\\xe9\n\\xe9a\n\n"


def test_output_to_a_fifo_is_written_into_it(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to(fifo)
    for path in (fifo, link):
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer need not wait
        assert run("generate", "--model", "m", "--prompt", "ab", "--output", str(path)) == 0
        assert json.loads(os.read(reader, 65536))["text"] == "ba"
        os.close(reader)
        assert stat.S_ISFIFO(fifo.lstat().st_mode) and link.is_symlink()
        assert sorted(tmp_path.iterdir()) == [fifo, link]


@pytest.mark.parametrize("is_there", [True, False])
def test_output_to_a_link_replaces_the_file_that_it_leads_to(tmp_path, is_there):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link = folder / "answers", tmp_path / "link"
    link.symlink_to(target)
    if is_there:
        target.write_text("old")
    mine = folder / "answers.part"  # a file of the user's
    mine.write_text("mine")
    assert run("generate", "--model", "m", "--prompt", "ab", "--output", str(link)) == 0
    assert link.is_symlink() and json.loads(target.read_text())["text"] == "ba"
    assert sorted(folder.iterdir()) == [target, mine] and mine.read_text() == "mine"


def test_output_to_a_socket_or_into_a_loop_of_links_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets must be short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket")
        status = run("generate", "--model", "m", "--prompt", "a", "--output", "socket")
    assert_refused(capsys, status, "output", "'socket' is neither a file, a FIFO nor a character device")
    (tmp_path / "loop").symlink_to("loop")
    assert_refused(capsys, run("generate", "--model", "m", "--prompt", "a", "--output", "loop"), "loop")
    assert stat.S_ISSOCK((tmp_path / "socket").lstat().st_mode) and (tmp_path / "loop").is_symlink()


def test_files_bindings_and_flags_reach_the_engine_the_later_winning(tmp_path):
    gin_file = tmp_path / "run.gin"
    gin_file.write_text("RunConfig.model = 'from file'\nEngineConfig.page_size = 32\nEngineConfig.max_num_seqs = 2\n")
    flags = ["--gin_file", str(gin_file), "--gin.EngineConfig.max_num_seqs=3", "--gin_param=EngineConfig.seed = 9"]
    flags += ["--gin_bindings", "EngineConfig.max_logprobs = 4", "--page_size=64", "--engine_seed=11"]
    flags += ["--tensor_parallel_size=2", "--prefill_token_buckets=32,64", "--kv_dtype=int8"]
    assert run("generate", "--prompt", "a", "--enable_prefix_caching=false", *flags) == 0
    (llm,) = EchoLLM.made
    assert llm.model == "from file"
    assert llm.engine_config == EngineConfig(
        page_size=64,
        max_num_seqs=3,
        seed=11,
        max_logprobs=4,
        prefill_token_buckets=(32, 64),
        kv_dtype="int8",
        enable_prefix_caching=False,
    )
    assert llm.mesh_config == MeshConfig(tensor=2)


def test_every_config_field_and_every_sampling_field_has_a_flag():
    # One value per field that differs from its default and passes the dataclass's checks beside the others.
    values = {
        EngineConfig: {
            "dtype": "float32", "kv_dtype": "float8_e4m3fn", "page_size": 32, "max_model_len": 64,
            "max_num_seqs": 3, "prefill_token_buckets": (16, 48), "query_block": 16, "max_decode_steps": 4,
            "num_pages": 9, "memory_fraction": 0.5, "enable_prefix_caching": True, "max_logprobs": 2, "seed": 8,
            "prefix_cache_scope": "tenant", "prefix_cache_floor": 0.1, "prefix_wait_tokens": 7, "max_pinned_pages": 3,
            "compilation_cache_dir": "here", "kv_cache_bytes": None, "decode_slot_buckets": (1, 3),
            "executables_dir": "there", "kv_scales": "per_tensor", "swap_bytes": 4096, "preemption": "swap",
        },
        MeshConfig: {"data": 2, "tensor": 3, "expert": 4},
        SamplingParams: {
            "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -7, "stop": ("a,b", "c"),
            "stop_token_ids": (1, 2), "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 5,
            "min_tokens": 1, "logprobs": 2, "prompt_logprobs": 1, "repetition_penalty": 1.5, "presence_penalty": -0.5,
            "frequency_penalty": 0.5, "logit_bias": {3: -2.0}, "allowed_token_ids": (3, 4), "banned_token_ids": (5,),
            "skip_special_tokens": False, "structured": StructuredOutput.regex("a,b"),
            "use_beam_search": False, "length_penalty": 1.0,
        },
    }  # fmt: skip
    renamed = {"data": "data_parallel_size", "tensor": "tensor_parallel_size", "expert": "expert_parallel_size"}
    argv = ["generate"]
    for cls, fields in values.items():
        assert set(fields) == {field.name for field in dataclasses.fields(cls)}
        for name, value in fields.items():
            flag = "engine_seed" if (cls, name) == (EngineConfig, "seed") else renamed.get(name, name)
            if name == "stop":
                argv += [f"--stop={text}" for text in value]
                continue
            if isinstance(value, StructuredOutput):
                value = json.dumps({"kind": value.kind, "value": value.value})
            elif isinstance(value, dict):
                value = ",".join(f"{key}:{number}" for key, number in value.items())
            elif isinstance(value, tuple):
                value = ",".join(map(str, value))
            argv.append(f"--{flag}={value}")
    args = build_parser().parse_args(argv)
    for cls, fields in values.items():
        given = given_fields(args, cls)
        assert {**given, "stop": tuple(given.get("stop", ()))} == {"stop": (), **fields}
        cls(**given)


def test_an_output_may_have_to_match_a_schema_of_a_file_or_what_a_flag_or_a_line_says(tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    line = {"prompt": "b", "structured": {"kind": "choice", "value": ["x", "y"]}}
    file = prompts_file(tmp_path, {"prompt": "a"}, line)
    assert run("generate", "--model", "m", "--prompts_file", file, "--json_schema", str(schema)) == 0
    first, second = EchoLLM.made[0].calls
    assert first[1].structured == StructuredOutput.json_schema({"type": "integer"})
    assert second[1].structured == StructuredOutput.choice(["x", "y"])
    flag = '--structured={"kind": "regex", "value": "a+"}'
    assert run("generate", "--model", "m", "--prompt", "a", flag, "--json_schema", str(schema)) != 0
    assert "--structured" in capsys.readouterr().err
    schema.write_text("{")
    assert run("generate", "--model", "m", "--prompt", "a", "--json_schema", str(schema)) != 0
    assert "schema.json" in capsys.readouterr().err


def test_a_switch_alone_means_true():
    assert run("generate", "--model", "m", "--prompt", "a", "--ignore_eos", "--max_tokens", "1") == 0
    assert EchoLLM.made[0].calls[0][1].ignore_eos is True


# (line, what the message must hold). The engine is not even built.
BAD_LINES = [
    ('{"prompt": "a", "top_p": 2}', ["top_p", "2"]),
    ('{"prompt": "a", "structured": "a+"}', ["structured", "kind"]),
    ('{"prompt": "a", "structured": {"kind": "regexp", "value": "a"}}', ["structured.kind", "'regexp'"]),
    ('{"prompt": "a", "max_tokens": "5"}', ["max_tokens", "'5'"]),
    ('{"prompt": "a", "temprature": 1}', ["'temprature'", "temperature"]),
    ('{"prompt": "a", "prompt_token_ids": [1]}', ["exactly one", "prompt, prompt_token_ids"]),
    ('{"max_tokens": 1}', ["exactly one", "none"]),
    ('{"prompt": 5}', ["prompt", "int"]),
    ('{"prompt": null}', ["prompt", "NoneType"]),
    ('{"prompt_token_ids": []}', ["prompt_token_ids", "not empty"]),
    ('{"prompt_token_ids": [1, -1]}', ["prompt_token_ids[1]", "-1"]),
    ('{"prompt_token_ids": [true]}', ["prompt_token_ids[0]", "True"]),
    ('{"messages": []}', ["messages", "not empty"]),
    ('{"messages": ["hi"]}', ["messages[0]", "role"]),
    ('{"messages": [{"role": 1, "content": "a"}]}', ["messages[0]", "role"]),
    ('{"prompt": "a", "logit_bias": {"AI": 1}}', ["logit_bias", "'AI'"]),
    ('{"prompt": "a", "logit_bias": {"1": 1e9}}', ["logit_bias[1]", "1000000000.0"]),
    ('{"prompt": "a", "temperature": NaN}', ["temperature", "nan"]),
    ('{"prompt": "a", "prompt": "b"}', ["'prompt'", "twice"]),
    ('{"prompt": "a", "logit_bias": {"1": 1, "01": 2}}', ["logit_bias", "an id is given twice"]),
    ('{"prompt": "a"', ["not JSON"]),
    ('["a"]', ["object", "list"]),
    ("a", ["not JSON"]),
    ("[" * 100_000, ["not JSON"]),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", ["not JSON"]),
]


@pytest.mark.parametrize(("line", "parts"), BAD_LINES, ids=[line[:60] for line, _ in BAD_LINES])
def test_a_bad_prompt_line_is_refused_by_number_and_field_before_anything_runs(capsys, tmp_path, line, parts):
    file = prompts_file(tmp_path, {"prompt": "good"}, "", line, {"prompt": "good"})
    status = run("generate", "--model", "m", "--prompts_file", file)
    assert_refused(capsys, status, f"{file} line 3", *parts)


def test_what_only_the_model_can_refuse_is_named_by_line_too(capsys, tmp_path):
    file = prompts_file(tmp_path, {"prompt": "good"}, {"prompt": "too long"})
    assert run("generate", "--model", "m", "--prompts_file", file) == 2
    assert f"{file} line 2: prompts[1].prompt: has 9 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["generate", "--prompt", "a"], ["RunConfig.model", "None"]),
        (["generate", "--model", "m"], ["--prompt", "--prompts_file"]),
        (["generate", "--model", "m", "--prompt", "a", "--prompts_file", "b"], ["--prompt"]),
        (["generate", "--model", "m", "--prompt", "a", "--page_size", "0"], ["EngineConfig.page_size", "0"]),
        (["generate", "--model", "m", "--prompt", "a", "--page_size", "x"], ["--page_size", "'x'"]),
        (["generate", "--model", "m", "--prompt", "a", "--dtype", "float16"], ["EngineConfig.dtype", "float16"]),
        (["generate", "--model", "m", "--prompt", "a", "--ignore_eos=maybe"], ["--ignore_eos", "'maybe'"]),
        (["generate", "--model", "m", "--prompt", "a", "--logit_bias", "1:2,1:3"], ["--logit_bias", "'1:2,1:3'"]),
        (["generate", "--model", "m", "--prompt", "a", "--temperature", "-1"], ["--prompt", "temperature", "-1"]),
        (["generate", "--model", "m", "--prompt", "a", "--max_token", "1"], ["--max_token"]),
        (
            ["generate", "--model", "m", "--prompt", "a", "--gin.EngineConfig.seed"],
            ["--gin.EngineConfig.seed", "value"],
        ),
        (["generate", "--model", "m", "--prompt", "a", "--gin.EngineConfig.sed=1"], ["'sed'"]),
        (["generate", "--model", "m", "--prompt", "a", "--gin_file", "no.gin"], ["no.gin"]),
        (["generate", "--model", "m", "--prompts_file", "/nowhere/p.jsonl"], ["/nowhere/p.jsonl", "No such file"]),
        (["generate", "--model", "m", "--prompt", "a", "--output", "/nowhere/out"], ["/nowhere/out", "No such file"]),
        (["generate", "--model", "m", "--prompt", "a", "--output", "/"], ["output", "folder"]),
        (["generate", "--model", "m", "--num_pages=3", "--kv_cache_bytes=5"], ["num_pages=3", "kv_cache_bytes=5"]),
        (["produce"], ["produce"]),
        ([], ["COMMAND"]),
        (["bench", "speed"], ["speed"]),
        (["convert", "a"], ["DST"]),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(capsys, argv, parts):
    assert_refused(capsys, run(*argv), *parts)


def test_a_prompts_file_with_nothing_in_it_is_refused(capsys, tmp_path):
    assert_refused(
        capsys, run("generate", "--model", "m", "--prompts_file", prompts_file(tmp_path, "", "")), "no prompts"
    )


def test_a_prompts_file_that_is_not_text_is_refused(capsys, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    assert_refused(capsys, run("generate", "--model", "m", "--prompts_file", str(path)), str(path), "UTF-8")


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path):
    file = prompts_file(tmp_path, '{"prompt": "a\u2028b\u0085c"}')
    assert run("generate", "--model", "m", "--prompts_file", file) == 0
    assert EchoLLM.made[0].calls[0][0] == {"prompt": "a\u2028b\u0085c"}


def test_a_request_that_failed_is_in_the_output_and_in_the_exit_status(capsys, tmp_path):
    file = prompts_file(tmp_path, {"prompt": "good"}, {"prompt": "fail"})
    output = tmp_path / "out.jsonl"
    assert run("generate", "--model", "m", "--prompts_file", file, "--output", str(output)) == 1
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert "error" not in records[0] and records[1]["error"] == "broke down"
    assert f"1 of 2 prompts failed: {file} line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("model.safetensors: header\nis short"),
        TokenizerError("tokenizer.json: has no vocabulary"),
        OSError(5, "lost", "disk"),
    ],
)
def test_a_model_that_cannot_be_opened_ends_in_one_line_and_debug_shows_where(capsys, error):
    def broken_llm(*args: Any, **kwargs: Any) -> None:
        raise error

    assert main(["generate", "--model", "m", "--prompt", "a"], llm_factory=broken_llm) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["generate", "--model", "m", "--prompt", "a", "--debug"], llm_factory=broken_llm) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_is_not_dressed_up_as_the_users():
    def broken_llm(*args: Any, **kwargs: Any) -> None:
        raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ"):
        main(["generate", "--model", "m", "--prompt", "a"], llm_factory=broken_llm)


def test_an_interrupt_ends_quietly_and_leaves_no_output_file(capsys, tmp_path):
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    output = tmp_path / "out.jsonl"
    argv = ["generate", "--model", "m", "--prompt", "a", "--output", str(output)]
    assert main(argv, llm_factory=interrupted) == 130
    assert capsys.readouterr().err == "headrace: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_print_config_prints_what_is_in_force_and_builds_nothing(capsys):
    assert run("generate", "--print_config", "--gin_file=hardware/cpu.gin", "--page_size=32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "EngineConfig.page_size = 32" in lines and "EngineConfig.dtype = 'float32'" in lines
    assert EchoLLM.made == []


def test_flags_may_come_from_a_file_as_absl_reads_it(tmp_path):
    flagfile = tmp_path / "flags"
    flagfile.write_text("--model=m\n--max_tokens=2\n")
    assert run("generate", f"--flagfile={flagfile}", "--prompt", "abc") == 0
    assert EchoLLM.made[0].calls[0][1].max_tokens == 2


def test_every_flag_of_a_config_says_what_it_is_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")  # nothing is wrapped
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = capsys.readouterr().out
    for cls in (RunConfig, EngineConfig, MeshConfig, SamplingParams):
        comments = field_comments(cls)
        assert comments.keys() == {field.name for field in dataclasses.fields(cls)}
        for name, comment in comments.items():
            assert comment and comment in text, (cls, name)


def test_help_is_there_and_imports_no_jax():
    commands = [["--help"], ["generate", "--help"], ["bench", "--help"], ["convert", "--help"], ["--version"]]
    script = f"""
import sys
from serving.__main__ import main
for argv in {commands!r}:
    try:
        main(argv)
    except SystemExit as end:
        assert end.code == 0, argv
loaded = {{"jax", "flax", "gin"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("headrace") >= len(commands)


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "serving", "frob"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: error: ") and done.stderr.count("\n") == 1


def test_convert_refuses_what_is_no_model_and_what_would_overwrite(capsys, tmp_path):
    assert_refused(capsys, run("convert", str(tmp_path / "nothing"), str(tmp_path / "new")), "nothing")
    assert_refused(capsys, run("convert", str(tmp_path / "nothing"), str(tmp_path)), str(tmp_path), "exists already")
    assert_refused(capsys, run("convert", "a", "b", "--dtype", "float16"), "--dtype", "float16")
