"""The six packages as a whole: whose they are, what they may import, and what none of them may do."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("serving", "layers", "pallas_kernels", "sharding", "checkpoints", "configs")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Modules that can run code out of data, and ways of running text or of importing what a file names.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "import_module", "run_path", "run_module"}

# Import name of a distribution where the two differ.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "gin": "gin-config",
    "google": "googleapis-common-protos",  # google.rpc; google.protobuf is protobuf's
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "opentelemetry": "opentelemetry-api",
    "orbax": "orbax-checkpoint",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
    "smg_grpc_proto": "smg-grpc-proto",
}


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def unsafe_uses(source: str) -> list[str]:
    """What `source` does that no file of ours may."""
    tree = ast.parse(source)
    found = [name for name in imported_modules(tree) if name.split(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("import_module", "run_path", "run_module"):
                name = node.func.attr
            if name in UNSAFE_CALLS:
                found.append(f"{name}() in line {node.lineno}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append("allow_pickle")
        elif isinstance(node, ast.Attribute) and node.attr in ("__reduce__", "__reduce_ex__"):
            found.append(node.attr)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_loaded_from_this_checkout(package):
    # Other distributions own some of these top-level names; ours must win.
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / package


def test_the_distribution_ships_these_packages_and_no_others():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(PACKAGES)
    assert sorted(project["tool"]["importlinter"]["root_packages"]) == sorted(PACKAGES)


def test_test_folders_are_not_packages():
    # A tests/serving/__init__.py would be imported as `serving`.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_scheduling_configs_and_requests_import_no_jax():
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if path.is_relative_to(ROOT / "configs") or path.is_relative_to(ROOT / "serving" / "scheduling")
    ]
    names += ["serving.request", "serving.__main__"]
    script = "import importlib, sys\n"
    script += f"for name in {names!r}:\n    importlib.import_module(name)\n"
    script += "    loaded = {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n    assert not loaded, (name, loaded)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_can_run_code_out_of_data():
    found = {str(path.relative_to(ROOT)): unsafe_uses(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: uses for path, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import a, dill",
        "from torch.serialization import load",
        "eval('1')",
        "exec(text)",
        "compile(text, 'f', 'exec')",
        "__import__(name)",
        "importlib.import_module(name)",
        "import_module(name)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "def f():\n    import marshal",
    ],
)
def test_the_scan_for_unsafe_code_finds_it(source):
    assert unsafe_uses(source)


@pytest.mark.parametrize("source", ["jax.jit(f).lower(x).compile()", "re.compile(p)", "np.load(p, allow_pickle=False)"])
def test_the_scan_for_unsafe_code_lets_the_rest_be(source):
    assert unsafe_uses(source) == []


def test_every_library_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra, needed in project["optional-dependencies"].items():
        requirements += needed if extra != "dev" else []
    declared = {requirement.split("[")[0].split(">")[0].split("=")[0].lower() for requirement in requirements}
    undeclared = {}
    for path in FILES:
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
            name = module.split(".")[0]
            if name in sys.stdlib_module_names or name in PACKAGES:
                continue
            if DISTRIBUTIONS.get(name, name).lower() not in declared:
                undeclared.setdefault(str(path.relative_to(ROOT)), []).append(name)
    assert undeclared == {}
