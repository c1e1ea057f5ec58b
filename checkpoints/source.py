"""Opens a model from any place it may come from. All that can be refused without reading weights is refused here."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.errors import CheckpointError, shown
from checkpoints.files import exists_in_folder, open_in_folder, read_json_object
from checkpoints.gguf_config import architecture, hf_config, special_token_ids
from checkpoints.gguf_reader import GgufFile, read_gguf
from checkpoints.packages import find_packaged_model
from checkpoints.param_names import (
    GGUF_NAMINGS,
    HF_GEMMA3_WITH_VISION,
    HF_NAMINGS,
    Naming,
    check_tensors,
    has_unused_lm_head,
)
from checkpoints.safetensors_reader import FLOAT_DTYPES, INDEX_FILE, SINGLE_FILE, SafetensorsTensor, read_folder
from checkpoints.tensors import SourceTensor
from configs.checks import ConfigError
from configs.hf import model_config_from_hf
from configs.model import ModelConfig
from sharding.param_spec import ParamSpec

if TYPE_CHECKING:
    import jax

    from checkpoints.load import Progress
    from checkpoints.orbax_store import OrbaxStore

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
MAX_GGUF_TOKENIZER_BYTES = 256 << 20

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
GGUF_TOKENIZER_FILE = "tokenizer_gguf.json"  # metadata of the GGUF file that the weights came from
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
CHAT_TEMPLATES_FOLDER = "additional_chat_templates"


class ModelSource(ABC):
    """A model that has been opened and checked, weights not yet read.

    `kind` is safetensors, gguf, orbax or dummy; `path` the file or folder.
    """

    kind: str

    def __init__(self, path: Path, model_config: ModelConfig, generation_config: dict[str, Any]) -> None:
        self.path = path
        self.model_config = model_config
        self.generation_config = generation_config  # as in generation_config.json; empty if there is none

    @abstractmethod
    def tokenizer_files(self) -> Path | dict[str, Any]:
        """A folder that may hold tokenizer files, or the metadata of a GGUF file, with `tokenizer.ggml.*`."""

    @abstractmethod
    def load_params(
        self,
        specs: Mapping[str, ParamSpec],
        shardings: Mapping[str, jax.sharding.Sharding],
        tensor_shards: int,
        progress: Progress | None = None,
    ) -> dict[str, jax.Array]:
        """Parameters by path, as `layers` describes them for `tensor_shards`, each in its sharding.

        `progress(done_bytes, total_bytes)` is called after each part. Raises CheckpointError if a file has changed
        since it was opened, or cannot be read.
        """

    @abstractmethod
    def extra_files(self) -> dict[str, bytes | Path]:
        """Config and tokenizer files that travel with the weights: name -> content or file."""


class _FolderSource(ModelSource):
    """A Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self.hf_config = read_json_object(open_in_folder(path, CONFIG_FILE), max_bytes=MAX_CONFIG_BYTES)
        try:
            model_config = model_config_from_hf(self.hf_config)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        super().__init__(path, model_config, _read_generation_config(path))

    def tokenizer_files(self) -> Path:
        return self.path

    def extra_files(self) -> dict[str, bytes | Path]:
        names = (CONFIG_FILE, GENERATION_CONFIG_FILE, *TOKENIZER_FILES)
        files = {name: open_in_folder(self.path, name).path for name in names if exists_in_folder(self.path, name)}
        return {**files, **_chat_templates(self.path)}


class SafetensorsSource(_FolderSource):
    """A folder with config.json and safetensors."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._naming = HF_NAMINGS[self.model_config.architecture]
        if "text_config" in self.hf_config:
            self._naming = HF_GEMMA3_WITH_VISION
        self._tensors = read_folder(path)
        check_tensors(self._tensors, self.model_config, self._naming, str(path))
        for tensor in self._tensors.values():
            if tensor.dtype_name not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{tensor.where}: dtype {tensor.dtype_name} is not supported for weights; "
                    f"{', '.join(FLOAT_DTYPES)} are"
                )

    @property
    def tensors(self) -> Mapping[str, SafetensorsTensor]:
        return self._tensors

    def load_params(
        self,
        specs: Mapping[str, ParamSpec],
        shardings: Mapping[str, jax.sharding.Sharding],
        tensor_shards: int,
        progress: Progress | None = None,
    ) -> dict[str, jax.Array]:
        return _load(self._tensors, self, self._naming, specs, shardings, tensor_shards, progress)


class GgufSource(ModelSource):
    """A GGUF file."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self._gguf = read_gguf(path)
        self.hf_config = hf_config(self._gguf)
        self._naming = GGUF_NAMINGS[architecture(self._gguf)]
        try:
            model_config = model_config_from_hf(self.hf_config)
        except ConfigError as error:
            raise ConfigError(f"{path}: its metadata as {error}") from error
        super().__init__(path, model_config, special_token_ids(self._gguf))
        check_tensors(self._gguf.tensors, self.model_config, self._naming, str(path))

    @property
    def gguf(self) -> GgufFile:
        return self._gguf

    def tokenizer_files(self) -> dict[str, Any]:
        return dict(self._gguf.metadata)

    def extra_files(self) -> dict[str, bytes | Path]:
        return {
            CONFIG_FILE: json.dumps(self.hf_config, indent=1).encode(),
            GENERATION_CONFIG_FILE: json.dumps(self.generation_config, indent=1).encode(),
            GGUF_TOKENIZER_FILE: self._metadata_json(),
        }

    def _metadata_json(self) -> bytes:
        try:
            return json.dumps(self._gguf.metadata, allow_nan=False).encode()
        except ValueError as error:
            raise CheckpointError(f"{self.path}: its metadata holds a number that is not finite") from error

    def load_params(
        self,
        specs: Mapping[str, ParamSpec],
        shardings: Mapping[str, jax.sharding.Sharding],
        tensor_shards: int,
        progress: Progress | None = None,
    ) -> dict[str, jax.Array]:
        return _load(self._gguf.tensors, self, self._naming, specs, shardings, tensor_shards, progress)


class OrbaxSource(ModelSource):
    """A folder of `checkpoints.orbax_store`."""

    kind = "orbax"

    def __init__(self, path: Path) -> None:
        from checkpoints.orbax_store import open_store

        self._store: OrbaxStore = open_store(path)
        super().__init__(path, self._store.model_config, _read_generation_config(path))

    @property
    def store(self) -> OrbaxStore:
        return self._store

    def tokenizer_files(self) -> Path | dict[str, Any]:
        if not exists_in_folder(self.path, GGUF_TOKENIZER_FILE):
            return self.path
        return read_json_object(open_in_folder(self.path, GGUF_TOKENIZER_FILE), max_bytes=MAX_GGUF_TOKENIZER_BYTES)

    def extra_files(self) -> dict[str, bytes | Path]:
        names = (CONFIG_FILE, GENERATION_CONFIG_FILE, GGUF_TOKENIZER_FILE, *TOKENIZER_FILES)
        files = {name: self.path / name for name in names if exists_in_folder(self.path, name)}
        return {**files, **_chat_templates(self.path)}

    def load_params(
        self,
        specs: Mapping[str, ParamSpec],
        shardings: Mapping[str, jax.sharding.Sharding],
        tensor_shards: int,
        progress: Progress | None = None,
    ) -> dict[str, jax.Array]:
        return self._store.load_params(specs, shardings, tensor_shards, progress)


class DummySource(_FolderSource):
    """The config of a folder, with random weights."""

    kind = "dummy"

    def load_params(
        self,
        specs: Mapping[str, ParamSpec],
        shardings: Mapping[str, jax.sharding.Sharding],
        tensor_shards: int,
        progress: Progress | None = None,
    ) -> dict[str, jax.Array]:
        from checkpoints.dummy import random_params

        return random_params(self.model_config, specs, shardings, tensor_shards, progress)


def _read_generation_config(folder: Path) -> dict[str, Any]:
    if not exists_in_folder(folder, GENERATION_CONFIG_FILE):
        return {}
    return read_json_object(open_in_folder(folder, GENERATION_CONFIG_FILE), max_bytes=MAX_CONFIG_BYTES)


def _chat_templates(folder: Path) -> dict[str, bytes | Path]:
    """Named chat templates beside the default one. A folder of them that is a link is left out."""
    templates = folder / CHAT_TEMPLATES_FOLDER
    if templates.is_symlink():
        return {}
    names = [path.name for path in sorted(templates.glob("*.jinja"))]
    return {f"{CHAT_TEMPLATES_FOLDER}/{name}": open_in_folder(templates, name).path for name in names}


def _load(
    tensors: Mapping[str, SourceTensor],
    source: ModelSource,
    naming: Naming,
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, jax.sharding.Sharding],
    tensor_shards: int,
    progress: Progress | None,
) -> dict[str, jax.Array]:
    from checkpoints.load import load_tensors, tables_differ

    config = source.model_config
    if has_unused_lm_head(tensors, config, naming):
        embed, lm_head = tensors[f"{naming.embed}.weight"], tensors[f"{naming.lm_head}.weight"]
        if tables_differ(embed, lm_head):
            logger.warning(
                "%s: differs from the embedding table, but tie_word_embeddings is true: the embedding table is used",
                lm_head.where,
            )
    return load_tensors(tensors, config, naming, specs, shardings, tensor_shards, progress)


def open_source(src: str) -> ModelSource:
    """Open the model at `src`: a folder with config.json and safetensors, a `.gguf` file, an Orbax folder of ours,
    `package:NAME` (a model inside an installed distribution) or `dummy:FOLDER` (config.json, random weights).

    Raises CheckpointError, and ConfigError for a config that cannot be served.
    """
    scheme, colon, rest = src.partition(":")
    if colon and scheme == "package":
        return GgufSource(find_packaged_model(rest))
    if colon and scheme == "dummy":
        return DummySource(_folder(rest))
    path = Path(src)
    if path.suffix == ".gguf" and not path.is_dir():
        return GgufSource(path)
    folder = _folder(src)
    from checkpoints.orbax_store import MANIFEST_FILE, PARAMS_FOLDER

    has_weights = exists_in_folder(folder, INDEX_FILE) or exists_in_folder(folder, SINGLE_FILE)
    if exists_in_folder(folder, MANIFEST_FILE) or (not has_weights and (folder / PARAMS_FOLDER).is_dir()):
        return OrbaxSource(folder)
    return SafetensorsSource(folder)


def _folder(src: str) -> Path:
    path = Path(src)
    if not src or not path.is_dir():
        raise CheckpointError(
            f"{shown(src)}: is not a folder or a .gguf file; a model source is one of these, "
            f"package:NAME or dummy:FOLDER"
        )
    return path
