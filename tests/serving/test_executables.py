"""`headrace compile` and a start from what it wrote, on CPU: bit-equal, compiling nothing, refused where anything differs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving import LLM, SamplingParams
from serving.__main__ import main
from serving.execution.executables import (
    MANIFEST_FILE,
    MAX_CACHED,
    LoadedProgram,
    add_to_cache,
    cache_folder,
    environment,
    file_name,
    load_executables,
)
from serving.execution.model_runner import ModelRunner
from serving.execution.program_plan import AbstractState, Program, like, plan_programs

TINY = Path(__file__).parents[1] / "data" / "tiny"
FLAGS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "page_size": 8,
    "prefill_token_buckets": (32,),
    "query_block": 16,
    "max_decode_steps": 2,
    "num_pages": 40,
    "kv_dtype": "int8",
    "swap_bytes": 2**24,
    "compilation_cache_dir": "",
}
PROMPTS = [[3, 1, 4, 1, 5], list(range(20, 60)), [9]]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)


def compile_folder(folder: Path, tensor: int, target: str = "cpu") -> int:
    flags = [
        f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in FLAGS.items()
    ]
    flags += [f"--tensor_parallel_size={tensor}", f"--model=dummy:{TINY}", f"--target={target}"]
    return main(["compile", *flags, f"--output={folder}"])


def make_llm(tensor: int, executables_dir: Path | None) -> LLM:
    folder = None if executables_dir is None else str(executables_dir)
    return LLM(f"dummy:{TINY}", tensor_parallel_size=tensor, executables_dir=folder, show_progress=False, **FLAGS)


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


class Compilations:
    """Counts backend compilations while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("executables") / "new" / "tiny"
    assert compile_folder(folder, tensor=1) == 0
    return folder


@pytest.fixture(scope="module")
def started(folder: Path) -> LLM:
    return make_llm(1, folder)


@pytest.fixture(scope="module")
def engine_parts(started: LLM) -> tuple[dict[str, Any], dict[str, Program], jax.sharding.Mesh]:
    """What `load_executables` takes beside the folder, for the engine that `folder` was made for."""
    runner = started.engine.runner
    state = AbstractState(like(runner.params), like(runner._kv_cache), like(runner._table))
    return (
        environment(runner.model, runner.config, state),
        plan_programs(runner.model, runner.config, runner.mesh, state),
        runner.mesh,
    )


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="serving.execution.executables"):
        yield


def edit(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    change(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_a_start_from_executables_compiles_no_program_and_answers_with_the_same_bits(
    folder: Path, started: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = make_llm(1, None)
    assert answers(started) == answers(compiled)
    assert started.engine.num_compiles_while_serving == 0
    first = started.engine.runner
    assert all(report.is_loaded for report in first.reports)
    # the same temporaries, so the same memory ledger
    assert {r.name: r.temp_bytes for r in first.reports} == {
        r.name: r.temp_bytes for r in compiled.engine.runner.reports
    }
    runner = ModelRunner(
        first.model,
        first.config,
        first.mesh,
        first.params,
        max_model_len=64,
        device_bytes=compiled.engine.runner.ledger.device,
    )
    caplog.clear()
    with Compilations() as compilations:
        runner.warm_up()
    assert compilations.count == 0
    num_programs = len(runner.reports)
    assert caplog.messages == [f"{folder}: loaded {num_programs} of {num_programs} programs"]


def test_a_cache_keeps_what_an_engine_compiled_and_drops_what_was_not_used_longest(
    tmp_path: Path, engine_parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    values, plan, mesh = engine_parts
    compiled = make_llm(1, None).engine.runner._compiled
    folder = cache_folder(tmp_path, values)
    assert folder != cache_folder(tmp_path, values | {"jax": "0.11.0"})
    for age in range(MAX_CACHED + 2):
        other = cache_folder(tmp_path, values | {"num_pages": age})
        other.mkdir(parents=True)
        os.utime(other, (10**9 - age, 10**9 - age))
    add_to_cache(folder, values, plan, compiled, mesh)
    add_to_cache(folder, values, plan, compiled, mesh)  # in the place of the first
    assert set(folder.parent.iterdir()) == {
        folder,
        *(cache_folder(tmp_path, values | {"num_pages": age}) for age in range(MAX_CACHED - 1)),
    }
    assert load_executables(folder, values, plan, mesh).keys() == plan.keys()
    (tmp_path / "file").write_text("")
    add_to_cache(cache_folder(tmp_path / "file", values), values, plan, compiled, mesh)
    assert "executables are not kept" in caplog.text


@pytest.mark.slow
def test_a_start_from_executables_over_four_devices_answers_with_the_same_bits(tmp_path: Path) -> None:
    assert compile_folder(tmp_path / "four", tensor=4) == 0
    started = make_llm(4, tmp_path / "four")
    assert all(report.is_loaded for report in started.engine.runner.reports)
    assert answers(started) == answers(make_llm(4, None))


@pytest.mark.parametrize(("name", "value"), [("zero pages", 0), ("copy pages", 1)])
def test_a_loaded_program_writes_donated_pages_in_place(folder: Path, engine_parts: Any, name: str, value: int) -> None:
    values, plan, mesh = engine_parts
    program = load_executables(folder, values, plan, mesh)[name].compiled
    pools, pages = plan[name].args
    cache = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), pools)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    numbers = np.full(pages.shape, 2, np.int32)
    if name == "copy pages":
        numbers[0], numbers[2] = 3, FLAGS["page_size"]  # from page 3, whole
    out = jax.tree.leaves(program(cache, numbers))
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    assert [x.unsafe_buffer_pointer() for x in out] == places
    assert all((np.asarray(x)[2] == value).all() and (np.asarray(x)[3] == 1).all() for x in out)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("jax",), "0.11.0", "jax is 0.11.0 there and "),
        (("jaxlib",), "0.11.0", "jaxlib is 0.11.0 there"),
        (("format",), 0, "format is 0 there and 1 here"),
        (("device_kind",), "NVIDIA H200", "device_kind is NVIDIA H200 there and cpu here"),
        (("mesh", "tensor"), 4, "mesh.tensor is 4 there and 1 here"),
        (("xla_flags",), ["--xla_cpu_max_isa=AVX2"], "xla_flags is "),
        (("jax_options", "jax_enable_x64"), "True", "jax_options.jax_enable_x64 is True there and False here"),
        (("code_sha256",), "0" * 64, "code_sha256 is 000"),
        (("model_sha256",), "0" * 64, "model_sha256 is 000"),
        (("processor_sha256",), "0" * 64, "processor_sha256 is 000"),
        (("EngineConfig", "page_size"), 16, "EngineConfig.page_size is 16 there and 8 here"),
        (("EngineConfig", "unheard_of"), 1, "EngineConfig.unheard_of is 1 there and None here"),
        (("num_pages",), 41, "num_pages is 41 there and 40 here"),
    ],
)
def test_executables_of_anything_else_are_not_used_and_the_log_says_what_differs(
    path: tuple[str, ...], value: Any, said: str, copy: Path, engine_parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        place = manifest["environment"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    edit(copy, change)
    assert load_executables(copy, *engine_parts) == {}
    assert said in caplog.text
    assert f"loaded 0 of {len(engine_parts[1])} programs" in caplog.text


def test_an_engine_with_another_page_size_says_so_and_compiles(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(
        f"dummy:{TINY}",
        executables_dir=str(folder),
        show_progress=False,
        **{**FLAGS, "page_size": 16, "max_decode_steps": 1},
    )
    assert "EngineConfig.page_size is 8 there and 16 here" in caplog.text
    assert not any(report.is_loaded for report in llm.engine.runner.reports)
    assert len(llm.generate([[5]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 12


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link_outside(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_a_byte, "sample_2.xla is damaged: its sha256 is not the manifest's"),
        (truncate, "sample_2.xla is damaged: its sha256 is not the manifest's"),
        (Path.unlink, "sample_2.xla: cannot be opened"),
        (link_outside, "is a link that leads outside"),
    ],
)
def test_a_damaged_file_leaves_out_that_program_alone(
    damage: Any, said: str, copy: Path, engine_parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    damage(copy / file_name("sample(2)"))
    loaded = load_executables(copy, *engine_parts)
    plan = engine_parts[1]
    assert loaded.keys() == plan.keys() - {"sample(2)"}
    assert "program sample(2) is compiled: " in caplog.text and said in caplog.text
    assert f"loaded {len(plan) - 1} of {len(plan)} programs" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": None},
        {"temp_bytes": -1},
        {"temp_bytes": True},
        {"inputs": "float32[8]"},
        {"outputs": []},
        {"kept_inputs": [0, 0]},
        {"kept_inputs": [10**9]},
        {"kept_inputs": [-1]},
        {"kept_inputs": [1.0]},
        {"kept_inputs": [0]},
        {"kept_inputs": None},
    ],
)
def test_a_malformed_entry_leaves_out_that_program_alone(change: dict[str, Any], copy: Path, engine_parts: Any) -> None:
    edit(copy, lambda manifest: manifest["programs"]["sample(2)"].update(change))
    assert load_executables(copy, *engine_parts).keys() == engine_parts[1].keys() - {"sample(2)"}


def test_an_executable_under_another_programs_name_is_not_used(copy: Path, engine_parts: Any) -> None:
    shutil.copy(copy / file_name("reset slot"), copy / file_name("sample(2)"))

    def change(manifest: dict[str, Any]) -> None:
        manifest["programs"]["sample(2)"]["sha256"] = manifest["programs"]["reset slot"]["sha256"]

    edit(copy, change)
    assert load_executables(copy, *engine_parts).keys() == engine_parts[1].keys() - {"sample(2)"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": [], "programs": {}}', "\x00", "{" * 100_000, None])
def test_a_folder_without_a_manifest_is_not_used(text: str | None, copy: Path, engine_parts: Any) -> None:
    (copy / MANIFEST_FILE).unlink()
    if text is not None:
        (copy / MANIFEST_FILE).write_text(text)
    loaded: dict[str, LoadedProgram] = load_executables(copy, *engine_parts)
    assert loaded == {}


def test_nothing_in_a_folder_is_a_pickle(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != MANIFEST_FILE:
            assert path.read_bytes()[:1] != b"\x80"  # what every pickle of protocol 2 and later begins with


def test_compile_refuses_what_it_cannot_know_or_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"--model=dummy:{TINY}"
    assert main(["compile", "--target=cpu", model, f"--output={tmp_path / 'x'}"]) == 2
    assert "EngineConfig.num_pages=None" in capsys.readouterr().err
    assert compile_folder(folder, 1) == 2
    assert f"{folder}: exists already" in capsys.readouterr().err
    assert compile_folder(tmp_path / "x", 1, target="h300") == 2
    assert "target='h300' is not known; known targets are cpu, h200" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
