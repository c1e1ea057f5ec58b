"""Files and flags to configs. The only module that knows gin, and it imports gin only when a gin source is given.

gin supplies the grammar, the binding table, macros and the lock. Its freedoms stay out: a file can bind fields of
the configs and nothing else. Imports, references (`@name`), scopes, unused macros and unknown names are
refused, since gin would run, accept or ignore them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig
from configs.operations import OperationsConfig
from configs.run import Configs, RunConfig
from configs.scheduling import SchedulingConfig
from configs.server import ServerConfig

CONFIG_CLASSES = {
    "RunConfig": RunConfig,
    "EngineConfig": EngineConfig,
    "MeshConfig": MeshConfig,
    "SchedulingConfig": SchedulingConfig,
    "ServerConfig": ServerConfig,
    "OperationsConfig": OperationsConfig,
}
PRESET_FOLDER = Path(__file__).parent  # models/, hardware/ and runs/ with the gin files we ship


def load_configs(
    gin_files: Sequence[str] = (),
    gin_bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Configs:
    """The configs that files, bindings and overrides give, each later source winning over the earlier ones.

    Args:
      gin_files: gin files in order. A relative name is looked for in the working folder, then in `search_paths`,
        then among the presets (`models/`, `hardware/`, `runs/`).
      gin_bindings: lines such as `EngineConfig.page_size = 32`.
      search_paths: folders to look for gin files in, in order.
      overrides: field values by config name, as in `{"EngineConfig": {"page_size": 32}}`.

    Leaves gin's global table holding these bindings, locked. May be called again; each call starts afresh.
    Raises ConfigError naming the field and value, and for a gin source the file and line.
    """
    overrides = overrides or {}
    for name, fields in overrides.items():
        if name not in CONFIG_CLASSES:
            raise ConfigError(f"{name} is not a config; known: {', '.join(CONFIG_CLASSES)}")
        for field in fields:
            _check_field(name, field)
    if gin_files or gin_bindings:
        return _load_with_gin(gin_files, gin_bindings, search_paths, overrides)
    return _build(overrides, {})


def config_text(configs: Configs) -> str:
    """Every field of every config as gin bindings, one a line: what is in force, and a file that gives it again.

    Secrets (fields that their config's repr leaves out) are not shown.
    """
    lines = []
    for config in (getattr(configs, field.name) for field in dataclasses.fields(configs)):
        for field in dataclasses.fields(config):
            if not field.repr:
                lines.append(f"# {type(config).__name__}.{field.name} is not shown: {len(getattr(config, field.name))}")
                continue
            lines.append(f"{type(config).__name__}.{field.name} = {getattr(config, field.name)!r}")
    return "\n".join(lines)


def changed_settings(configs: Configs) -> list[str]:
    """The lines of `config_text` that are not the defaults'."""
    defaults = config_text(Configs()).splitlines()
    return [line for line in config_text(configs).splitlines() if line not in defaults]


def _check_field(config: str, field: str) -> None:
    known = [f.name for f in dataclasses.fields(CONFIG_CLASSES[config])]
    if field not in known:
        raise ConfigError(f"{config} has no field {field!r}; known: {', '.join(known)}")


def _build(values: Mapping[str, Mapping[str, Any]], origins: Mapping[tuple[str, str], str]) -> Configs:
    """Configs from field values. `origins` says where a (config, field) was bound, for messages."""
    built: dict[str, Any] = {}
    for name, cls in CONFIG_CLASSES.items():
        try:
            built[name] = cls(**values.get(name, {}))
        except ConfigError as error:
            message = str(error)
            for (config, field), origin in origins.items():
                if config == name and message.startswith((f"{name}.{field} ", f"{name}.{field}=")):
                    raise ConfigError(f"{message} (bound in {origin})") from None
            raise
    return Configs(
        run=built["RunConfig"],
        engine=built["EngineConfig"],
        mesh=built["MeshConfig"],
        scheduling=built["SchedulingConfig"],
        server=built["ServerConfig"],
        operations=built["OperationsConfig"],
    )


def _load_with_gin(
    gin_files: Sequence[str],
    gin_bindings: Sequence[str],
    search_paths: Sequence[str],
    overrides: Mapping[str, Mapping[str, Any]],
) -> Configs:
    gin = _gin()
    gin.clear_config()
    table = _BindingTable(search_paths)
    for name in gin_files:
        table.read_file(name)
    for text in gin_bindings:
        table.read(text, label=f"binding {text[:80]!r}", stack=())
    for config, fields in overrides.items():
        for field, value in fields.items():
            gin.bind_parameter(("", config, field), value)
            table.origins.pop((config, field), None)
    table.check_macros()
    try:
        gin.finalize()  # refuses %gin.REQUIRED that nothing replaced
        values = {name: gin.get_bindings(name) for name in CONFIG_CLASSES}
    except RecursionError:
        raise ConfigError("gin: a macro is set to a value that uses the macro itself") from None
    except ValueError as error:
        raise ConfigError(f"gin: {str(error).splitlines()[0]}") from None
    return _build(values, table.origins)


@functools.cache
def _gin() -> Any:
    """The gin module, with our configs registered."""
    try:
        import gin
        import gin.config_parser
    except ImportError:
        raise ConfigError("gin files and bindings need the package gin-config, which is not installed") from None
    with gin.config.interactive_mode():  # or a reload of this module in a notebook would raise
        for name, cls in CONFIG_CLASSES.items():
            gin.external_configurable(cls, name=name, module="headrace")
    return gin


class _ValueDelegate:
    """What gin's parser calls for `@name` and `%name`. Keeps the names seen; makes gin's object for a macro only."""

    def __init__(self, gin: Any):
        self.references: list[str] = []
        self.macros: list[str] = []
        self._gin = gin

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        self.references.append(scoped_configurable_name)

    def macro(self, macro_name: str) -> Any:
        self.macros.append(macro_name)
        return self._gin.config.ParserDelegate().macro(macro_name)


class _BindingTable:
    """Reads gin sources into gin's table, refusing what a config file has no business saying."""

    def __init__(self, search_paths: Sequence[str]):
        self.origins: dict[tuple[str, str], str] = {}  # (config, field) -> "FILE line N" of the binding in force
        self._folders = ["", *search_paths, str(PRESET_FOLDER)]
        self._macros_set: dict[str, str] = {}  # macro name -> "FILE line N"
        self._macros_used: dict[str, str] = {}  # macro name -> "FILE line N" of its first use

    def read_file(self, name: str, *, stack: tuple[str, ...] = (), asked_by: str = "--gin_file") -> None:
        """Bind what file `name` says. `stack` holds the files whose includes led here."""
        tried = [os.path.join(folder, name) for folder in self._folders]
        path = next((path for path in tried if os.path.isfile(path)), None)
        if path is None:
            raise ConfigError(f"{asked_by}: no file {name!r}; looked for {', '.join(dict.fromkeys(tried))}")
        if os.path.realpath(path) in stack:
            raise ConfigError(f"{asked_by}: {name!r} includes itself")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{asked_by}: cannot read {path}: {error}") from None
        self.read(text, label=path, stack=(*stack, os.path.realpath(path)))

    def read(self, text: str, *, label: str, stack: tuple[str, ...]) -> None:
        """Bind what `text` says. `label` names it in messages."""
        gin = _gin()
        parser = gin.config_parser
        for statement, where in self._statements(text, label):
            if isinstance(statement, parser.ImportStatement):
                raise ConfigError(f"{where}: `{statement.format()}`: a config file may not import")
            if isinstance(statement, parser.IncludeStatement):
                self.read_file(statement.filename, stack=stack, asked_by=where)
                continue
            if statement.scope:
                raise ConfigError(f"{where}: scope {statement.scope!r} is not known: nothing here is built in a scope")
            if isinstance(statement, parser.BindingStatement) and not statement.arg_name:
                self._macros_set[statement.selector] = where
                gin.bind_parameter((statement.selector, "gin.macro", "value"), statement.value)
                continue
            if statement.selector not in CONFIG_CLASSES:
                known = ", ".join(CONFIG_CLASSES)
                raise ConfigError(f"{where}: {statement.selector!r} cannot be bound; known: {known}")
            if isinstance(statement, parser.BlockDeclaration):
                continue
            try:
                _check_field(statement.selector, statement.arg_name)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
            gin.bind_parameter(("", statement.selector, statement.arg_name), statement.value)
            self.origins[statement.selector, statement.arg_name] = where

    def _statements(self, text: str, label: str) -> Iterator[tuple[Any, str]]:
        """(statement, "FILE line N") of each statement in `text`."""
        gin = _gin()
        delegate = _ValueDelegate(gin)
        try:
            for statement in gin.config_parser.ConfigParser(text, delegate):
                where = f"{label} line {statement.location.line_num}"
                if delegate.references:
                    raise ConfigError(f"{where}: @{delegate.references[0]}: a config file may not refer to code")
                for name in delegate.macros:
                    self._macros_used.setdefault(name, where)
                delegate.macros.clear()
                yield statement, where
        except SyntaxError as error:
            raise ConfigError(f"{label} line {error.lineno}: {error.msg.splitlines()[0]}") from None
        except tokenize.TokenError as error:
            raise ConfigError(f"{label} line {error.args[1][0]}: {error.args[0]}") from None
        except TypeError as error:  # a dict key that cannot be one
            raise ConfigError(f"{label}: {error}") from None

    def check_macros(self) -> None:
        """Refuse a macro that is set and never used (a binding whose config name was forgotten) or the reverse."""
        for name, where in self._macros_set.items():
            if name not in self._macros_used:
                raise ConfigError(f"{where}: {name!r} is set but never used; a field is bound as CONFIG.{name} = ...")
        for name, where in self._macros_used.items():
            if name not in self._macros_set and name not in ("gin.REQUIRED", "REQUIRED"):
                raise ConfigError(f"{where}: macro %{name} is used but never set")
