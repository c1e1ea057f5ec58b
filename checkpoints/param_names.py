"""Which rows of which foreign tensors make up each of our parameters, for each family of checkpoints.

Every parameter is a matrix in disguise: its leading axes count rows, the others columns, and each row is a row of
one foreign tensor (or zero, in a padded vocabulary). So a table from our rows to foreign rows says everything:
fused projections, the grouping of query heads by KV head, copies of KV heads, and the row order of GGUF.

Shape letters: V vocabulary, D model width, F MLP width, N query heads, H head_dim; K stored KV heads and G query
heads of each, as `sharding.placement.stored_kv_heads` counts them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from checkpoints.errors import CheckpointError, shown
from checkpoints.tensors import SourceTensor
from configs.model import ModelConfig
from sharding.placement import padded_vocab_size, stored_kv_heads


@dataclass(frozen=True)
class Naming:
    """Tensor names of one family, `{i}` being the layer. Names of matrices lack their `.weight` or `.bias`.

    Where q, k and v have one name (or gate and up), the tensor holds them one after the other.
    """

    embed: str
    final_norm: str
    lm_head: str
    attn_norm: str
    q: str
    k: str
    v: str
    q_norm: str
    k_norm: str
    o: str
    post_attn_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    post_mlp_norm: str
    ignored: str  # pattern of tensors that hold nothing of the model
    interleaved_rope: bool = False  # rows 2i and 2i + 1 of a q or k head turn together; ours i and i + H / 2
    adds_norm_offset: bool = False  # norm weights lack `norm_weight_offset`


HF = Naming(
    embed="model.embed_tokens",
    final_norm="model.norm",
    lm_head="lm_head",
    attn_norm="model.layers.{i}.input_layernorm",
    q="model.layers.{i}.self_attn.q_proj",
    k="model.layers.{i}.self_attn.k_proj",
    v="model.layers.{i}.self_attn.v_proj",
    q_norm="model.layers.{i}.self_attn.q_norm",
    k_norm="model.layers.{i}.self_attn.k_norm",
    o="model.layers.{i}.self_attn.o_proj",
    post_attn_norm="",
    mlp_norm="model.layers.{i}.post_attention_layernorm",
    gate="model.layers.{i}.mlp.gate_proj",
    up="model.layers.{i}.mlp.up_proj",
    down="model.layers.{i}.mlp.down_proj",
    post_mlp_norm="",
    # tables that old versions of the library saved; they follow from the config
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",
    adds_norm_offset=True,
)
HF_GEMMA = replace(
    HF,
    post_attn_norm="model.layers.{i}.post_attention_layernorm",
    mlp_norm="model.layers.{i}.pre_feedforward_layernorm",
    post_mlp_norm="model.layers.{i}.post_feedforward_layernorm",
)
# the text model of Gemma3ForConditionalGeneration; its vision tower is left out
HF_GEMMA3_WITH_VISION = replace(
    HF_GEMMA,
    **{
        field.name: "language_model." + getattr(HF_GEMMA, field.name)
        for field in fields(Naming)
        if field.name not in ("ignored", "interleaved_rope", "adds_norm_offset")
    },
    ignored=rf"(vision_tower|multi_modal_projector)\..*|language_model\.({HF.ignored})",
)
HF_FUSED = replace(
    HF,
    q="model.layers.{i}.self_attn.qkv_proj",
    k="model.layers.{i}.self_attn.qkv_proj",
    v="model.layers.{i}.self_attn.qkv_proj",
    gate="model.layers.{i}.mlp.gate_up_proj",
    up="model.layers.{i}.mlp.gate_up_proj",
)
HF_NAMINGS = {
    "LlamaForCausalLM": HF,
    "MistralForCausalLM": HF,
    "Qwen2ForCausalLM": HF,
    "Qwen3ForCausalLM": HF,
    "Gemma2ForCausalLM": HF_GEMMA,
    "Gemma3ForCausalLM": HF_GEMMA,
    "Phi3ForCausalLM": HF_FUSED,
}

GGUF = Naming(
    embed="token_embd",
    final_norm="output_norm",
    lm_head="output",
    attn_norm="blk.{i}.attn_norm",
    q="blk.{i}.attn_q",
    k="blk.{i}.attn_k",
    v="blk.{i}.attn_v",
    q_norm="blk.{i}.attn_q_norm",
    k_norm="blk.{i}.attn_k_norm",
    o="blk.{i}.attn_output",
    post_attn_norm="blk.{i}.post_attention_norm",
    mlp_norm="blk.{i}.ffn_norm",
    gate="blk.{i}.ffn_gate",
    up="blk.{i}.ffn_up",
    down="blk.{i}.ffn_down",
    post_mlp_norm="blk.{i}.post_ffw_norm",
    # rope_freqs is read into the config (gguf_config.py); attn_rot_embd is a table of old files
    ignored=r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd",
)
GGUF_NAMINGS = {  # by general.architecture
    "llama": replace(GGUF, interleaved_rope=True),
    "qwen2": GGUF,
    "qwen3": GGUF,
    "gemma2": GGUF,
    "gemma3": GGUF,
}


def param_shapes(config: ModelConfig, tensor_shards: int) -> dict[str, tuple[int, ...]]:
    """Every parameter of a model by path, with its shape over `tensor_shards`."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    K = stored_kv_heads(config, tensor_shards)
    G = config.num_heads // K
    V = padded_vocab_size(config, tensor_shards)
    shapes: dict[str, tuple[int, ...]] = {"embed/weight": (V, D)}
    for i in range(config.num_layers):
        layer = {
            "attn_norm/weight": (D,),
            "qkv/kernel": (K, G + 2, H, D),
            "qkv/bias": (K, G + 2, H) if config.qkv_bias else None,
            "q_norm/weight": (H,) if config.qk_norm else None,
            "k_norm/weight": (H,) if config.qk_norm else None,
            "o/kernel": (D, K, G, H),
            "o/bias": (D,) if config.attention_out_bias else None,
            "post_attn_norm/weight": (D,) if config.post_norms else None,
            "mlp_norm/weight": (D,),
            "gate_up/kernel": (2, F, D),
            "gate_up/bias": (2, F) if config.mlp_bias else None,
            "down/kernel": (D, F),
            "down/bias": (D,) if config.mlp_bias else None,
            "post_mlp_norm/weight": (D,) if config.post_norms else None,
        }
        shapes |= {f"layers/{i}/{name}": shape for name, shape in layer.items() if shape is not None}
    shapes["final_norm/weight"] = (D,)
    if not config.tie_word_embeddings:
        shapes["lm_head/weight"] = (V, D)
    return shapes


def is_norm(path: str) -> bool:
    """Whether the parameter is a norm's weight: float32, with the family's offset added."""
    return path.endswith("norm/weight")


@dataclass(frozen=True)
class ParamRows:
    """One parameter as rows of foreign tensors."""

    num_row_axes: int  # leading axes of the parameter that count rows
    tensors: tuple[str, ...]
    tensor_of_row: np.ndarray  # [rows] index into `tensors`; -1: the row is zero
    foreign_row: np.ndarray  # [rows] int64


def param_rows(path: str, shape: tuple[int, ...], config: ModelConfig, naming: Naming) -> ParamRows:
    """The foreign rows of the parameter at `path`, which has `shape` (as `param_shapes` gives it)."""
    scope, _, leaf = path.rpartition("/")  # leaf: weight, kernel or bias
    layer, _, module = scope.rpartition("/")
    suffix = ".bias" if leaf == "bias" else ".weight"

    def foreign(template: str) -> str:
        return template.format(i=layer.removeprefix("layers/")) + suffix

    if module == "qkv":
        names = [foreign(template) for template in (naming.q, naming.k, naming.v)]
        return _qkv_rows(shape, config, names, naming.interleaved_rope)
    if module == "gate_up":
        names, size = [foreign(naming.gate), foreign(naming.up)], shape[1]
        return _from_parts(2, names, [size, size], np.repeat([0, 1], size), np.tile(np.arange(size), 2))
    template = getattr(naming, module)
    num_rows = config.vocab_size if module in ("embed", "lm_head") else shape[0]
    ids = np.arange(shape[0])
    return ParamRows(1, (foreign(template),), np.where(ids < num_rows, 0, -1), ids)


def _from_parts(
    num_row_axes: int, names: list[str], sizes: list[int], part_of_row: np.ndarray, row_in_part: np.ndarray
) -> ParamRows:
    """Rows of parts of which part p has `sizes[p]` rows and is the tensor `names[p]`; where parts share one tensor,
    they follow each other in it."""
    tensors = tuple(dict.fromkeys(names))
    tensor_of_part = np.array([tensors.index(name) for name in names])
    start_of_part = np.cumsum([0, *sizes[:-1]]) if len(tensors) == 1 else np.zeros(len(names), int)
    return ParamRows(num_row_axes, tensors, tensor_of_part[part_of_row], row_in_part + start_of_part[part_of_row])


def _qkv_rows(shape: tuple[int, ...], config: ModelConfig, names: list[str], interleaved_rope: bool) -> ParamRows:
    K, G, H = shape[0], shape[1] - 2, shape[2]
    copies = K // config.num_kv_heads  # stored KV heads per KV head of the model
    in_head = np.arange(H)
    rotated = in_head.reshape(H // 2, 2).T.ravel() if interleaved_rope else in_head
    kv_heads = np.arange(K)[:, None, None] // copies
    heads = [
        # query heads keep their order: the copies of a KV head split its group in order
        np.arange(K * G).reshape(K, G, 1) * H + rotated,
        kv_heads * H + rotated,
        kv_heads * H + in_head,
    ]
    sizes = [config.num_heads * H, config.num_kv_heads * H, config.num_kv_heads * H]
    parts = np.concatenate([np.full(rows.shape, part) for part, rows in enumerate(heads)], axis=1)
    return _from_parts(3, names, sizes, parts.ravel(), np.concatenate(heads, axis=1).ravel())


def expected_tensors(config: ModelConfig, naming: Naming) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of the model must have, with their shapes."""
    D, F = config.hidden_size, config.intermediate_size
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    parts: list[tuple[str, int, tuple[int, ...]]] = [  # name, rows, columns
        (f"{naming.embed}.weight", config.vocab_size, (D,)),
        (f"{naming.final_norm}.weight", D, ()),
    ]
    if not config.tie_word_embeddings:
        parts.append((f"{naming.lm_head}.weight", config.vocab_size, (D,)))
    layer: list[tuple[str, int, tuple[int, ...]]] = [
        (f"{naming.attn_norm}.weight", D, ()),
        (f"{naming.mlp_norm}.weight", D, ()),
        (f"{naming.o}.weight", D, (N * H,)),
        (f"{naming.down}.weight", D, (F,)),
    ]
    attention = [(naming.q, N * H), (naming.k, K * H), (naming.v, K * H)]
    mlp = [(naming.gate, F), (naming.up, F)]
    layer += [(f"{name}.weight", rows, (D,)) for name, rows in attention + mlp]
    if config.qkv_bias:
        layer += [(f"{name}.bias", rows, ()) for name, rows in attention]
    if config.mlp_bias:
        layer += [(f"{name}.bias", rows, ()) for name, rows in [*mlp, (naming.down, D)]]
    if config.attention_out_bias:
        layer.append((f"{naming.o}.bias", D, ()))
    if config.qk_norm:
        layer += [(f"{naming.q_norm}.weight", H, ()), (f"{naming.k_norm}.weight", H, ())]
    if config.post_norms:
        layer += [(f"{naming.post_attn_norm}.weight", D, ()), (f"{naming.post_mlp_norm}.weight", D, ())]
    for i in range(config.num_layers):
        parts += [(name.format(i=i), rows, columns) for name, rows, columns in layer]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in parts:  # a fused tensor has the rows of all its parts
        shapes[name] = (rows + shapes.get(name, (0,))[0], *columns)
    return shapes


def check_tensors(tensors: Mapping[str, SourceTensor], config: ModelConfig, naming: Naming, where: str) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the model's tensors, each in the shape the config
    implies. A tied model may also have an output table, see `has_unused_lm_head`."""
    expected = expected_tensors(config, naming)
    lm_head = f"{naming.lm_head}.weight"
    missing = [name for name in expected if name not in tensors]
    if missing:
        why = "; tie_word_embeddings is false, so the output table must be stored" if missing == [lm_head] else ""
        raise CheckpointError(f"{where}: tensor {shown(missing[0])}: is missing{_and_more(missing)}{why}")
    if config.tie_word_embeddings:
        expected[lm_head] = expected[f"{naming.embed}.weight"]
    ignored = re.compile(naming.ignored)
    unknown = [name for name in tensors if name not in expected and not ignored.fullmatch(name)]
    if unknown:
        raise CheckpointError(
            f"{tensors[unknown[0]].where}: is not a tensor of {config.architecture}{_and_more(unknown)}"
        )
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            raise CheckpointError(
                f"{tensors[name].where}: shape {shown(list(tensors[name].shape))} is not {list(shape)}, "
                f"which the config implies"
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""


def has_unused_lm_head(tensors: Mapping[str, SourceTensor], config: ModelConfig, naming: Naming) -> bool:
    """Whether a tied model stores an output table too. The embedding table is used for both, as the config says."""
    return config.tie_word_embeddings and f"{naming.lm_head}.weight" in tensors
