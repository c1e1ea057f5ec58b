"""Files, bindings and overrides to configs, and everything a config file may not say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig, mixed_decode_sizes
from configs.load import PRESET_FOLDER, config_text, load_configs
from configs.run import Configs, RunConfig

PRESETS = sorted(PRESET_FOLDER.rglob("*.gin"))


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_the_dataclass_defaults():
    assert load_configs() == Configs(run=RunConfig(), engine=EngineConfig(), mesh=MeshConfig())


def test_a_later_file_wins_then_a_binding_then_an_override(tmp_path):
    first = write(
        tmp_path, "a.gin", "EngineConfig.page_size = 32\nEngineConfig.max_num_seqs = 2\nMeshConfig.tensor = 2\n"
    )
    second = write(tmp_path, "b.gin", "EngineConfig:\n  page_size = 64\n  seed = 5\n")
    configs = load_configs(
        [first, second],
        ["EngineConfig.seed = 6", "EngineConfig.max_logprobs = 3"],
        overrides={"EngineConfig": {"seed": 7}},
    )
    assert configs.engine == EngineConfig(page_size=64, max_num_seqs=2, seed=7, max_logprobs=3)
    assert configs.mesh == MeshConfig(tensor=2)


def test_values_may_come_from_a_macro(tmp_path):
    file = write(tmp_path, "a.gin", "EngineConfig.page_size = %SIZE\nEngineConfig.query_block = %SIZE\nSIZE = 64\n")
    assert load_configs([file]).engine == EngineConfig(page_size=64, query_block=64)


def test_includes_and_relative_names_are_found_on_the_search_paths_in_order(tmp_path):
    write(tmp_path, "one/base.gin", "EngineConfig.seed = 1")
    write(tmp_path, "two/base.gin", "EngineConfig.seed = 2")
    write(tmp_path, "two/top.gin", "include 'base.gin'\nEngineConfig.page_size = 32")
    configs = load_configs(["top.gin"], search_paths=[str(tmp_path / "one"), str(tmp_path / "two")])
    assert (configs.engine.seed, configs.engine.page_size) == (1, 32)


def test_a_second_call_starts_afresh():
    assert load_configs(gin_bindings=["EngineConfig.page_size = 64"]).engine.page_size == 64
    assert load_configs(gin_bindings=["EngineConfig.seed = 1"]).engine == EngineConfig(seed=1)


def test_after_loading_gin_is_locked():
    import gin

    load_configs(gin_bindings=["EngineConfig.page_size = 64"])
    with pytest.raises(RuntimeError, match="locked"):
        gin.bind_parameter("EngineConfig.page_size", 32)


def test_the_printed_config_gives_the_same_configs_again(tmp_path):
    configs = load_configs(
        overrides={
            "RunConfig": {"model": 'it\'s a "folder"'},
            "EngineConfig": {"prefill_token_buckets": (32, 96), "kv_dtype": "int8", "memory_fraction": 0.25},
            "MeshConfig": {"tensor": 4},
        }
    )
    assert load_configs([write(tmp_path, "printed.gin", config_text(configs))]) == configs


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: str(path.relative_to(PRESET_FOLDER)))
def test_every_preset_loads(path):
    name = str(path.relative_to(PRESET_FOLDER))
    configs = load_configs([name], overrides={"RunConfig": {"model": "somewhere"}})
    assert configs.run.model == "somewhere"


def test_the_presets_of_one_run_go_together():
    for hardware in (PRESET_FOLDER / "hardware").glob("*.gin"):
        for run in ("online", "offline"):
            load_configs(["models/smollm2_135m.gin", f"hardware/{hardware.name}", f"runs/{run}.gin"])


def test_there_are_presets_of_each_kind():
    assert {path.parent.name for path in PRESETS} == {"models", "hardware", "runs"}


def test_a_model_preset_without_a_place_of_its_own_asks_for_one():
    with pytest.raises(ConfigError, match=r"RunConfig\.model.*REQUIRED.*not subsequently overridden"):
        load_configs(["models/llama3_8b.gin"])


# (binding, what the message must hold). Every refusal names the field, and the value where there is one.
REFUSED_BINDINGS = [
    ("EngineConfig.page_size = '16'", ["EngineConfig.page_size", "'16'"]),
    ("EngineConfig.page_size = True", ["EngineConfig.page_size", "True"]),
    ("EngineConfig.page_size = 16.0", ["EngineConfig.page_size", "16.0"]),
    ("EngineConfig.page_size = None", ["EngineConfig.page_size", "None"]),
    ("EngineConfig.page_size = 0", ["EngineConfig.page_size", "[1, 1024]", "0"]),
    ("EngineConfig.dtype = 'float16'", ["EngineConfig.dtype", "float16", "bfloat16"]),
    ("EngineConfig.kv_dtype = 'fp8'", ["EngineConfig.kv_dtype", "fp8", "float8_e4m3fn"]),
    ("EngineConfig.kv_scales = 'per_head'", ["EngineConfig.kv_scales", "per_head", "per_token_head"]),
    ("EngineConfig.kv_scales = 'per_token_head'", ["EngineConfig.kv_scales='per_token_head'", "kv_dtype='auto'"]),
    ("EngineConfig.max_model_len = 1", ["EngineConfig.max_model_len", "1"]),
    ("EngineConfig.prefill_token_buckets = [64, 512]", ["EngineConfig.prefill_token_buckets", "[64, 512]"]),
    ("EngineConfig.prefill_token_buckets = (512, 64)", ["EngineConfig.prefill_token_buckets", "(512, 64)"]),
    ("EngineConfig.prefill_token_buckets = (40,)", ["EngineConfig.prefill_token_buckets", "query_block=32"]),
    ("EngineConfig.max_decode_steps = 17", ["EngineConfig.max_decode_steps=17", "page_size=16"]),
    ("EngineConfig.memory_fraction = 1.5", ["EngineConfig.memory_fraction", "1.5"]),
    ("EngineConfig.memory_fraction = 1e999", ["EngineConfig.memory_fraction", "inf"]),
    ("EngineConfig.enable_prefix_caching = 1", ["EngineConfig.enable_prefix_caching", "1"]),
    ("EngineConfig.seed = -1", ["EngineConfig.seed", "-1"]),
    ("MeshConfig.tensor = 0", ["MeshConfig.tensor", "0"]),
    ("RunConfig.model = ''", ["RunConfig.model", "''"]),
    ("RunConfig.model = 5", ["RunConfig.model", "5"]),
    ("EngineConfig.page_size = %gin.REQUIRED", ["EngineConfig.page_size", "REQUIRED"]),
    ("EngineConfig.page_size = @MeshConfig()", ["@MeshConfig"]),
    ("EngineConfig.page_size = @os.system", ["@os.system"]),
    ("EngineConfig.prefill_token_buckets = (64, @gin.singleton())", ["@gin.singleton"]),
    ("EngineConfig.page_sizes = 16", ["EngineConfig", "'page_sizes'", "page_size"]),
    ("EngineConfg.page_size = 16", ["'EngineConfg'", "EngineConfig"]),
    ("prefill/EngineConfig.page_size = 16", ["'prefill'"]),
    ("gin.macro.value = 16", ["'gin.macro'"]),
    ("page_size = 16", ["'page_size'", "never used"]),
    ("EngineConfig.page_size = %SIZE", ["%SIZE", "never set"]),
    ("import os", ["import os", "may not import"]),
    ("from os import path", ["from os import path", "may not import"]),
    ("from __gin__ import dynamic_registration", ["may not import"]),
    ("include 'nowhere.gin'", ["'nowhere.gin'"]),
    ("EngineConfig.page_size = __import__('os')", ["__import__"]),
    ("EngineConfig.page_size = 8 + 8", ["EngineConfig.page_size = 8 + 8", "newline"]),
    ("EngineConfig.page_size = (16,", ["EOF"]),
    ("EngineConfig.page_size = {[1]: 2}", ["unhashable"]),
    ("EngineConfig.page_size = " + "(" * 300, ["too many nested parentheses"]),
]


@pytest.mark.parametrize(("binding", "parts"), REFUSED_BINDINGS, ids=[text[:60] for text, _ in REFUSED_BINDINGS])
def test_a_bad_binding_is_refused_and_the_message_names_it(binding, parts):
    with pytest.raises(ConfigError) as caught:
        load_configs(gin_bindings=[binding])
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_macro_set_to_itself_is_refused():
    with pytest.raises(ConfigError, match="uses the macro itself"):
        load_configs(gin_bindings=["EngineConfig.page_size = %A", "A = %A"])


def test_an_error_in_a_file_names_file_and_line(tmp_path):
    file = write(tmp_path, "a.gin", "# sizes\n\nEngineConfig:\n  seed = 1\n  page_size = 'x'\n")
    with pytest.raises(ConfigError, match=r"page_size must be an integer, got 'x' \(bound in .*a\.gin line 5\)"):
        load_configs([file])
    file = write(tmp_path, "b.gin", "EngineConfig.seed = 1\nEngineConfig.sed = 1\n")
    with pytest.raises(ConfigError, match=r"b\.gin line 2: EngineConfig has no field 'sed'"):
        load_configs([file])
    file = write(tmp_path, "c.gin", "EngineConfig.seed = 1\n\nEngineConfig.seed == 1\n")
    with pytest.raises(ConfigError, match=r"c\.gin line 3"):
        load_configs([file])


def test_a_file_that_includes_itself_through_another_is_refused(tmp_path):
    write(tmp_path, "a.gin", "include 'b.gin'")
    write(tmp_path, "b.gin", "include 'a.gin'")
    with pytest.raises(ConfigError, match=r"b\.gin line 1: 'a\.gin' includes itself"):
        load_configs(["a.gin"], search_paths=[str(tmp_path)])


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.gin").write_bytes(b"EngineConfig.seed = \xff")
    with pytest.raises(ConfigError, match=r"cannot read .*a\.gin"):
        load_configs([str(tmp_path / "a.gin")])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"EngineConfig": {"page_size": 0}}, r"EngineConfig\.page_size must be in \[1, 1024\], got 0"),
        ({"EngineConfig": {"pages": 1}}, "EngineConfig has no field 'pages'"),
        ({"FleetConfig": {}}, "FleetConfig is not a config"),
        ({"EngineConfig": {"num_pages": 8, "kv_cache_bytes": 9}}, r"num_pages=8 contradicts kv_cache_bytes=9"),
        ({"EngineConfig": {"preemption": "swap"}}, r"preemption='swap' needs host memory: give swap_bytes"),
        ({"EngineConfig": {"preemption": "recompute", "swap_bytes": 9}}, r"swap_bytes=9 is for preemption='auto' or"),
        ({"EngineConfig": {"preemption": "drop"}}, r"preemption must be one of auto, recompute, swap; got 'drop'"),
        ({"EngineConfig": {"swap_bytes": -1}}, r"swap_bytes must be >= 0, got -1"),
    ],
)
def test_a_bad_override_is_refused_with_and_without_gin(overrides, message):
    for bindings in ((), ("MeshConfig.tensor = 1",)):
        with pytest.raises(ConfigError, match=message):
            load_configs(gin_bindings=bindings, overrides=overrides)


def test_a_flag_that_contradicts_a_file_is_refused():
    with pytest.raises(ConfigError, match=r"EngineConfig\.num_pages=8 contradicts kv_cache_bytes=4096"):
        load_configs(gin_bindings=["EngineConfig.kv_cache_bytes = 4096"], overrides={"EngineConfig": {"num_pages": 8}})


def test_a_missing_model_source_is_an_error_only_when_it_is_needed():
    with pytest.raises(ConfigError, match=r"RunConfig\.model=None"):
        _ = load_configs().run.model_source


def test_plain_configs_need_no_gin():
    script = "import sys; sys.modules['gin'] = None\nfrom configs.load import load_configs, config_text\n"
    script += "print(config_text(load_configs(overrides={'EngineConfig': {'seed': 3}})))\n"
    script += "from configs.checks import ConfigError\n"
    script += "try:\n    load_configs(gin_bindings=['EngineConfig.seed = 3'])\n"
    script += "except ConfigError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "EngineConfig.seed = 3" in done.stdout
    assert "gin-config, which is not installed" in done.stdout


def test_only_the_loader_knows_gin():
    users = []
    for path in PRESET_FOLDER.rglob("*.py"):
        names = [
            alias.name if isinstance(node, ast.Import) else node.module or ""
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ]
        if any(name.split(".")[0] == "gin" for name in names):
            users.append(path.name)
    assert users == ["load.py"]


def test_scales_of_one_are_refused_for_int8_which_would_round_most_values_to_nothing():
    assert EngineConfig(kv_dtype="float8_e4m3fn", kv_scales="per_tensor").kv_format == ("float8_e4m3fn", "per_tensor")
    assert EngineConfig(kv_dtype="int8").kv_format == ("int8", "per_token_head")
    assert EngineConfig(dtype="float32").kv_format == ("float32", None)
    with pytest.raises(ConfigError, match=r"EngineConfig\.kv_scales='per_tensor'.*kv_dtype='int8'"):
        EngineConfig(kv_dtype="int8", kv_scales="per_tensor")


def test_smaller_mixed_programs_are_made_where_they_leave_out_one_row_in_72():
    sizes = (8, 32, 64, 128, 256)
    assert mixed_decode_sizes(sizes, 512) == sizes  # without 24 of 544 rows one in 23 less
    assert mixed_decode_sizes(sizes, 2048) == (32, 64, 128, 256)  # without 24 of 2,080 one in 87
    assert mixed_decode_sizes(sizes, 4096) == (64, 128, 256)
    assert mixed_decode_sizes(sizes, 16384) == (8, 256)  # without 128 of 16,640 one in 130, without 248 one in 67
    assert mixed_decode_sizes((256,), 64) == (256,)
    assert mixed_decode_sizes((1, 2, 4), 4) == (2, 4)  # two slots at least: one decodes, one is prefilled
