"""RunConfig: what one run serves. Configs: the configs of a run together."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.checks import ConfigError
from configs.engine import EngineConfig, MeshConfig
from configs.operations import OperationsConfig
from configs.scheduling import SchedulingConfig
from configs.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the model comes from. Raises ConfigError.

    `model` is a folder with config.json and safetensors, a `.gguf` file, an Orbax folder, `package:NAME` (a model
    inside an installed package) or `dummy:FOLDER` (random weights for the config.json there).
    """

    model: str | None = None  # folder, .gguf file, Orbax folder, package:NAME or dummy:FOLDER (random weights)

    def __post_init__(self) -> None:
        if self.model is None:
            return
        if not isinstance(self.model, str) or not self.model.strip() or "\0" in self.model:
            raise ConfigError(f"RunConfig.model must be a model source, got {self.model!r}")

    @property
    def model_source(self) -> str:
        """`model`, or ConfigError if none was given."""
        if self.model is None:
            raise ConfigError("RunConfig.model=None: give a model source (--model)")
        return self.model


@dataclass(frozen=True, kw_only=True)
class Configs:
    """Every config of one run."""

    run: RunConfig = field(default_factory=RunConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
