"""Any model source -> an Orbax folder of ours."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import jax.numpy as jnp

from checkpoints.errors import CheckpointError
from checkpoints.load import Progress
from checkpoints.orbax_store import save_params
from checkpoints.param_names import is_norm, param_shapes
from checkpoints.source import GgufSource, ModelSource, OrbaxSource, SafetensorsSource, open_source
from configs.checks import ConfigError
from configs.engine import DTYPES
from sharding.param_spec import ParamSpec

logger = logging.getLogger(__name__)


def convert(src: str, dst: str, dtype: str | None = None, progress: Progress | None = None) -> None:
    """Write the model at `src` as an Orbax folder `dst`, with its config and tokenizer files.

    Matrices become `dtype`; None keeps every value exact: bfloat16 where the source stores that, else float32. The
    whole model is held in the host's memory. Raises CheckpointError (also if `dst` exists) and ConfigError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if Path(dst).exists():
        raise CheckpointError(f"{dst}: exists already")
    source = open_source(src)
    target_dtype = jnp.dtype(dtype or exact_dtype(source))
    specs = {
        path: ParamSpec(shape, jnp.float32 if is_norm(path) else target_dtype, (None,) * len(shape))
        for path, shape in param_shapes(source.model_config, 1).items()
    }
    on_host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    params = source.load_params(specs, dict.fromkeys(specs, on_host), 1, progress)
    save_params(dst, params, source.model_config, source.extra_files())
    logger.info("%s: written to %s in %s", src, dst, target_dtype)


def exact_dtype(source: ModelSource) -> str:
    """The narrowest dtype that holds every matrix of the source exactly."""
    if isinstance(source, SafetensorsSource):
        names = {t.dtype_name for t in source.tensors.values() if len(t.shape) > 1}
        return "bfloat16" if names <= {"BF16", "F8_E4M3", "F8_E5M2"} else "float32"
    if isinstance(source, GgufSource):
        names = {t.type_name for t in source.gguf.tensors.values() if len(t.shape) > 1}
        return "bfloat16" if names == {"BF16"} else "float32"
    if isinstance(source, OrbaxSource):
        return "float32" if source.store.dtypes["embed/weight"] == "float32" else "bfloat16"
    return "bfloat16"
