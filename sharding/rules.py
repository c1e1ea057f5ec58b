"""The table from logical axes to mesh axes: the one place that knows what is split over what."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sharding.param_spec import EMBED, KV_HEADS, MLP, VOCAB

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"
EXPERT_AXIS = "expert"
MESH_AXES = (DATA_AXIS, TENSOR_AXIS, EXPERT_AXIS)

MESH_AXIS_OF: Mapping[str, str | None] = MappingProxyType(
    {EMBED: None, VOCAB: TENSOR_AXIS, KV_HEADS: TENSOR_AXIS, MLP: TENSOR_AXIS}
)
