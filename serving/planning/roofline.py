"""Step times from a model's sizes and a device's peaks: what to expect before anything was measured. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

from configs.checks import check_float
from configs.model import ModelConfig
from serving.bench.figures import ModelCost
from serving.scheduling.step_time import StepWork


@dataclass(frozen=True, kw_only=True)
class HardwarePeaks:
    """What one device reaches at best, and what a dispatch costs before it does anything. Raises ConfigError."""

    read_bytes_per_s: float
    flops_per_s: float  # of dense products in the dtype that is served
    dispatch_s: float  # launch, sampling, and what does not shrink with the work

    def __post_init__(self) -> None:
        check_float(self, "read_bytes_per_s", above=0.0)
        check_float(self, "flops_per_s", above=0.0)
        check_float(self, "dispatch_s", minimum=0.0)


# Vendors' figures for dense bfloat16, less what our kernels were seen to leave (docs/performance.md); by the beginning
# of the device kind's name as JAX gives it. Only a start: what is measured soon counts for more.
PEAKS = {
    "NVIDIA H200": HardwarePeaks(read_bytes_per_s=4.3e12, flops_per_s=7.0e14, dispatch_s=3e-4),
    "NVIDIA H100": HardwarePeaks(read_bytes_per_s=2.9e12, flops_per_s=7.0e14, dispatch_s=3e-4),
    "NVIDIA A100": HardwarePeaks(read_bytes_per_s=1.7e12, flops_per_s=2.4e14, dispatch_s=3e-4),
    "TPU v5 lite": HardwarePeaks(read_bytes_per_s=7.0e11, flops_per_s=1.5e14, dispatch_s=3e-4),
    "TPU v6 lite": HardwarePeaks(read_bytes_per_s=1.4e12, flops_per_s=6.5e14, dispatch_s=3e-4),
    "cpu": HardwarePeaks(read_bytes_per_s=1e10, flops_per_s=5e10, dispatch_s=1e-3),
}


def hardware_peaks(device_kind: str) -> HardwarePeaks:
    """Of the kind by its name; those of an H100 for one that is not known."""
    return next((peaks for name, peaks in PEAKS.items() if device_kind.startswith(name)), PEAKS["NVIDIA H100"])


def config_cost(model: ModelConfig, *, weight_bytes: float, kv_bytes: float) -> ModelCost:
    """A model's cost on one device from its config alone, as `serving.bench.figures.model_cost` has it from arrays.

    weight_bytes, kv_bytes: of a value. Norms and biases are left out, which are less than a thousandth of the rest.
    """
    qkv_params = model.hidden_size * model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
    out_params = model.num_heads * model.head_dim * model.hidden_size
    mlp_params = 3 * model.hidden_size * model.intermediate_size  # gate, up and down
    layer_params = model.num_layers * (qkv_params + out_params + mlp_params)
    head_params = model.vocab_size * model.hidden_size
    return ModelCost(
        weight_bytes=round((layer_params + head_params) * weight_bytes),
        kv_token_bytes=2 * model.num_kv_heads * model.head_dim * kv_bytes,
        windows=tuple(
            model.sliding_window if layer_type == "sliding_attention" else None for layer_type in model.layer_types
        ),
        layer_params=layer_params,
        head_params=head_params,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
    )


@dataclass(frozen=True, kw_only=True)
class RooflineStepTime:
    """Seconds of a dispatch by the roofline (Williams et al. 2009): a pass takes the longer of reading the weights and
    multiplying its rows with them; keys and values are read, and prompts' scores computed, on top of that.

    `cost` is of one device (bytes) and of all (FLOPs), as `ModelCost` has it; `num_devices` share the FLOPs. Every layer
    counts as one of full attention: StepWork does not say how many keys lie inside a window.
    """

    cost: ModelCost
    peaks: HardwarePeaks
    num_devices: int = 1

    def predict_s(self, work: StepWork) -> float:
        cost, peaks = self.cost, self.peaks
        flops_per_s = peaks.flops_per_s * self.num_devices
        num_layers = len(cost.windows)
        row_flops = 2.0 * (cost.layer_params + cost.head_params)
        product_flops = row_flops * work.num_decode_slots + 2.0 * cost.layer_params * work.prefill_bucket
        pass_s = max(cost.weight_bytes / peaks.read_bytes_per_s, product_flops / flops_per_s)
        kv_s = cost.kv_token_bytes * num_layers * work.decode_kv_tokens / peaks.read_bytes_per_s
        score_s = cost.attention_flops(num_layers * work.prefill_kv_pairs) / flops_per_s
        return peaks.dispatch_s + work.num_decode_steps * pass_s + kv_s + score_s
