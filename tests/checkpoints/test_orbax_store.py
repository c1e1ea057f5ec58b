"""Our own folders: saved on some devices and opened on others, whole or refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoints.convert import convert
from checkpoints.errors import CheckpointError
from checkpoints.orbax_store import MANIFEST_FILE, save_params
from checkpoints.source import open_source
from configs.checks import ConfigError

DATA = Path(__file__).parents[1] / "data"


def save(source, params, path: Path) -> Path:
    save_params(path, params, source.model_config, source.extra_files())
    return path


def assert_same(params: dict, expected: dict) -> None:
    assert params.keys() == expected.keys()
    for path, array in params.items():
        assert array.dtype == expected[path].dtype and array.sharding == expected[path].sharding, path
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[path]), err_msg=path)


@pytest.mark.parametrize("saved_on", [1, 8])
def test_saved_on_some_devices_it_opens_on_others(saved_on, tools, rng, load, tmp_path):
    """Two KV heads and a vocabulary of 301: on 8 shards each head is stored four times, and padding differs."""
    config = tools.llama | {"attention_bias": True}
    source = open_source(str(tools.write_folder(tmp_path / "m", config, tools.llama_tensors(config, rng))))
    saved = open_source(str(save(source, load(source, saved_on), tmp_path / "saved")))
    assert saved.kind == "orbax" and saved.model_config == source.model_config
    for shards in (1, 2, 4, 8):
        assert_same(load(saved, shards), load(source, shards))
    assert_same(load(saved, 2, dtype="bfloat16"), load(source, 2, dtype="bfloat16"))


def test_saved_on_8_devices_it_gives_the_same_log_probs_on_1_and_4(tools, rng, load, log_probs, tmp_path):
    config = tools.llama
    source = open_source(str(tools.write_folder(tmp_path / "m", config, tools.llama_tensors(config, rng))))
    saved = open_source(str(save(source, load(source, 8), tmp_path / "saved")))
    token_ids = rng.integers(0, 301, 50).tolist()
    for shards in (1, 4):
        [expected] = log_probs(source, [token_ids], shards)
        [found] = log_probs(saved, [token_ids], shards)
        np.testing.assert_array_equal(found, expected)


def test_config_tokenizer_and_generation_config_travel_along(tools, rng, load, tmp_path):
    folder = tools.write_folder(tmp_path / "m", tools.llama, tools.llama_tensors(tools.llama, rng))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4], "top_p": 0.9}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    convert(str(folder), str(tmp_path / "saved"))
    source = open_source(str(tmp_path / "saved"))
    assert source.generation_config == {"eos_token_id": [3, 4], "top_p": 0.9}
    assert source.tokenizer_files() == tmp_path / "saved"
    names = ("tokenizer.json", "config.json", "generation_config.json", "additional_chat_templates/rag.jinja")
    for name in names:
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()


def test_a_gguf_converts_with_its_tokenizer(tools, rng, load, tmp_path):
    fields = {
        "tokenizer.ggml.tokens": ("array", [f"token {i}" for i in range(301)]),
        "tokenizer.ggml.scores": ("array", [0.5] * 301),
        "tokenizer.ggml.eos_token_id": ("uint32", 7),
        "tokenizer.chat_template": ("string", "{{ messages }}"),
    }
    tensors = tools.llama_tensors(tools.llama, rng)
    path = tools.write_gguf(tmp_path / "m.gguf", tools.llama, tensors, "Q8_0", extra_fields=fields)
    calls = []
    convert(str(path), str(tmp_path / "saved"), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    source, gguf = open_source(str(tmp_path / "saved")), open_source(str(path))
    assert source.tokenizer_files() == gguf.tokenizer_files()
    assert source.model_config == gguf.model_config and source.generation_config == gguf.generation_config
    assert source.model_config.eos_token_ids == (7,)
    assert_same(load(source, 4), load(gguf, 4))
    # and once more, from our own format
    convert(str(tmp_path / "saved"), str(tmp_path / "again"))
    assert_same(load(tmp_path / "again", 2), load(gguf, 2))
    assert open_source(str(tmp_path / "again")).tokenizer_files() == gguf.tokenizer_files()


@pytest.mark.parametrize("variant", ["gemma3", "phi3_longrope_partial", "qwen2_sliding"])
def test_every_field_of_a_config_survives(variant, load, tmp_path):
    source = open_source(str(DATA / "arch" / variant))
    convert(str(DATA / "arch" / variant), str(tmp_path / "saved"))
    saved = open_source(str(tmp_path / "saved"))
    assert saved.model_config == source.model_config
    assert_same(load(saved, 2), load(source, 2))  # Gemma's 1 + w is not added twice


def test_dtypes_are_exact_unless_asked_for(load, tmp_path):
    folder = str(DATA / "arch" / "llama_plain")  # stored as float32
    convert(folder, str(tmp_path / "exact"))
    convert(folder, str(tmp_path / "half"), "bfloat16")
    assert set(open_source(str(tmp_path / "exact")).store.dtypes.values()) == {"float32"}
    assert set(open_source(str(tmp_path / "half")).store.dtypes.values()) == {"float32", "bfloat16"}
    assert_same(load(tmp_path / "half", 2, dtype="bfloat16"), load(folder, 2, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16; got 'int4'"):
        convert(folder, str(tmp_path / "x"), "int4")


def test_saving_prints_no_warning(tmp_path, caplog):
    convert(str(DATA / "bad_files" / "valid-sharded"), str(tmp_path / "saved"))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there: exists already"):
        convert(str(DATA / "bad_files" / "valid-sharded"), str(tmp_path / "there"))
    assert list((tmp_path / "there").iterdir()) == []


# --- damage


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("orbax") / "saved"
    convert(str(DATA / "bad_files" / "valid-sharded"), str(path))
    return path


@pytest.fixture
def copy(saved_folder, tmp_path) -> Path:
    return Path(shutil.copytree(saved_folder, tmp_path / "copy"))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_in_any_file_is_found(copy):
    draw = random.Random(seed := random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    open_source(str(copy))
    for path in files_of(copy):
        data = path.read_bytes()
        for _ in range(3 if path.name != MANIFEST_FILE else 100):
            at = draw.randrange(len(data))
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match=path.name):
                open_source(str(copy))
        path.write_bytes(data)
    open_source(str(copy))


def test_a_missing_cut_longer_or_added_file_is_found(copy):
    for path in files_of(copy):
        data = path.read_bytes()
        for change in ("missing", "cut", "longer", "link"):
            if change == "missing":
                path.unlink()
            elif change == "link":
                path.unlink()
                (copy.parent / "elsewhere").write_bytes(data)
                path.symlink_to(copy.parent / "elsewhere")
            else:
                path.write_bytes(data[:-1] if change == "cut" else data + b"\0")
            if change == "link" and path.name == MANIFEST_FILE:
                path.unlink()  # the user may keep it elsewhere: its content is checked all the same
            else:
                with pytest.raises(CheckpointError, match=path.name):
                    open_source(str(copy))
                path.unlink(missing_ok=True)
            path.write_bytes(data)
    (copy / "params" / "stray").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"params/stray' is not listed"):
        open_source(str(copy))


def forge(folder: Path, change) -> None:
    """Change the manifest's content, and write its digests anew, as somebody could."""
    from checkpoints.files import ReadOnlyFile
    from checkpoints.orbax_store import _digest, _digest_of

    content = json.loads((folder / MANIFEST_FILE).read_bytes().partition(b"\n")[2])
    change(content)
    for name, entry in content["files"].items() if isinstance(content.get("files"), dict) else ():
        if (folder / name).is_file() and isinstance(entry, dict):
            entry |= {"bytes": (folder / name).stat().st_size, "digest": _digest(ReadOnlyFile(folder / name))}
    text = json.dumps(content).encode()
    (folder / MANIFEST_FILE).write_bytes(_digest_of(text).encode() + b"\n" + text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=2), "'format': 2 is not 1"),
        (lambda c: c.update(files=[]), "'files': must be a JSON dict"),
        (lambda c: c["files"].update({"../outside": {}}), "missing from the folder"),
        (lambda c: c["params"].pop("final_norm/weight"), "'final_norm/weight': is missing"),
        (lambda c: c["params"].update(x={"shape": [1], "dtype": "float32"}), "'x': is not one of the model"),
        (lambda c: c["params"]["embed/weight"].update(shape=[40, 32]), "'embed/weight': shape [40, 32] does not fit"),
        (lambda c: c["params"]["embed/weight"].update(shape=[-48, 32]), "shape must be positive integers"),
        (
            lambda c: c["params"]["embed/weight"].update(shape=[2**40, 32]),
            "'shape': [48, 32] is not [1099511627776, 32]",
        ),
        (lambda c: c["params"]["embed/weight"].update(dtype="object"), "dtype 'object' is not supported"),
        (lambda c: c["params"]["final_norm/weight"].update(dtype="bfloat16"), "dtype 'bfloat16' is not supported"),
        (lambda c: c["params"]["layers/0/qkv/kernel"].update(shape=[3, 4, 8, 32]), "3 stored KV heads do not fit 2"),
        (lambda c: c["model_config"].update(num_layers=2**40), "layer_types"),
        (lambda c: c["model_config"].update(hidden_size="32"), "hidden_size"),
        (lambda c: c["model_config"].update(nonsense=1), "ModelConfig has no field 'nonsense'"),
        (lambda c: c["model_config"].pop("rope"), "model_config.rope must be a JSON object"),
        (lambda c: c["model_config"].pop("vocab_size"), "vocab_size"),
        (lambda c: c["model_config"]["rope"].update(factor=[]), "factor"),
        (lambda c: c["model_config"].update(vocab_size=64), "does not fit"),
    ],
)
def test_a_forged_manifest_that_contradicts_itself_is_refused(change, message, copy):
    forge(copy, change)
    with pytest.raises((CheckpointError, ConfigError)) as refusal:
        open_source(str(copy))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"shape":[48,32]', '"shape":[99,32]', "'shape': [99, 32] is not [48, 32]"),
        ('"data_type":"float32"', '"data_type":"int8"', "'data_type': 'int8' is not float32"),
        ('"chunk_shape":[48,32]', '"chunk_shape":[4294967296,4294967296]', "is larger than the array"),
        ('"chunk_shape":[48,32]', '"chunk_shape":[-1]', "is not 2 positive integers"),
        ("{", "[", "is not JSON"),
    ],
)
def test_forged_array_metadata_is_refused_before_orbax_sees_it(old, new, message, copy):
    file = copy / "params" / "embed" / "weight" / "zarr.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    forge(copy, lambda content: None)
    with pytest.raises(CheckpointError) as refusal:
        open_source(str(copy))
    assert message in str(refusal.value) and "embed/weight/zarr.json" in str(refusal.value)


LOADER = """
import sys
import jax, jax.numpy as jnp
from checkpoints.errors import CheckpointError
from checkpoints.source import open_source
from layers.params import param_specs

source = open_source(sys.argv[1])
specs = param_specs(source.model_config, jnp.float32, 1)
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
try:
    source.load_params(specs, dict.fromkeys(specs, sharding), 1)
except CheckpointError as error:
    print(error)
"""


def test_forged_array_data_is_refused_by_orbax(copy):
    """In a process of its own: a crash would be seen, and Orbax leaves reads behind that Python then complains of."""
    [chunk] = [path for path in files_of(copy / "params" / "embed") if path.name != "zarr.json"]
    chunk.write_bytes(b"\xff" * chunk.stat().st_size)
    forge(copy, lambda content: None)
    run = subprocess.run(
        [sys.executable, "-c", LOADER, str(copy)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    assert "Orbax cannot restore it" in run.stdout and len(run.stdout.splitlines()) == 1


# --- interruption

SAVER = """
import sys
from checkpoints.convert import convert
print("ready", flush=True)
convert(sys.argv[1], sys.argv[2])
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_saver_killed_at_random_moments_leaves_nothing_that_opens(tools, rng, load, tmp_path):
    config = tools.llama | {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4}  # 30 MB
    folder = tools.write_folder(tmp_path / "m", config, tools.llama_tensors(config, rng))
    expected = load(folder)
    draw = random.Random(seed := random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    # one whole run tells how long it takes
    run = spawn(folder, tmp_path / "whole")
    started = time.monotonic()
    run.communicate(timeout=300)
    longest_s = time.monotonic() - started
    outcomes = []
    for i in range(6):
        target = tmp_path / "kills" / str(i) / "saved"
        target.parent.mkdir(parents=True)
        run = spawn(folder, target)
        time.sleep(draw.uniform(0.0, longest_s))
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        for path in (target, *target.parent.glob(".*")):
            try:
                source = open_source(str(path))
            except CheckpointError:
                outcomes.append("refused")
                continue
            # a folder that opens is whole; one that was not yet renamed may be too
            assert_same(load(source), expected)
            outcomes.append("whole")
    print(outcomes)
    assert "refused" in outcomes


def spawn(folder: Path, target: Path) -> subprocess.Popen:
    """Convert in another process; returns when it has imported what it needs."""
    run = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(folder), str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    return run
