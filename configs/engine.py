"""EngineConfig: how one engine holds memory and batches work. MeshConfig: how its devices are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.checks import check_bool, check_choice, check_float, check_int, check_int_tuple, fail

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the device mesh's axes. Raises ConfigError."""

    data: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in ("data", "tensor", "expert"):
            check_int(self, field, minimum=1)

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.expert


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and switches of one engine; everything that decides how many programs are compiled is here.

    Raises ConfigError on a wrong type, a value out of range, or a contradiction between two fields.
    """

    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # weights and activations
    kv_dtype: Literal["float32", "bfloat16"] | None = None  # None: as dtype
    page_size: int = 16  # tokens
    max_model_len: int | None = None  # tokens, prompt + output; None: the model's own limit
    max_num_seqs: int = 8  # slots
    # Slots that a decode step may run over, one program each; the smallest that holds every running slot is taken.
    # None: max_num_seqs alone. With several, a row's bits depend on how many others run: products differ with size.
    decode_slot_buckets: tuple[int, ...] | None = None
    prefill_token_buckets: tuple[int, ...] = (64, 512)  # tokens a step may prefill; one program each (and one mixed)
    query_block: int = 32  # prefill tokens a row of the attention call; divides every bucket
    max_decode_steps: int = 8  # decode steps in one dispatch when nothing waits
    num_pages: int | None = None  # None: what fits memory
    memory_fraction: float = 0.9  # of the device's memory that weights, workspace and KV may fill
    kv_cache_bytes: int | None = None  # bound on the KV pool; None: what memory_fraction leaves
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    seed: int = 0
    compilation_cache_dir: str | None = None  # None: the user's cache folder; "": off
    executables_dir: str | None = None  # what `headrace compile` wrote: used where it fits, and trusted like a program

    def __post_init__(self) -> None:
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "kv_dtype", DTYPES, optional=True)
        check_int(self, "page_size", minimum=1, maximum=1024)
        check_int(self, "max_model_len", minimum=2, optional=True)
        check_int(self, "max_num_seqs", minimum=1, maximum=4096)
        if self.decode_slot_buckets is not None:
            check_int_tuple(self, "decode_slot_buckets", minimum=1)
        check_int_tuple(self, "prefill_token_buckets", minimum=1)
        check_int(self, "query_block", minimum=1)
        check_int(self, "max_decode_steps", minimum=1, maximum=64)
        check_int(self, "num_pages", minimum=2, optional=True)
        check_float(self, "memory_fraction", above=0.0, maximum=1.0)
        check_int(self, "kv_cache_bytes", minimum=1, optional=True)
        check_bool(self, "enable_prefix_caching")
        check_int(self, "max_logprobs", minimum=0, maximum=20)
        if self.compilation_cache_dir is not None and not isinstance(self.compilation_cache_dir, str):
            fail(self, "compilation_cache_dir", "must be a folder's name, or an empty one for none")
        if self.executables_dir is not None and (not isinstance(self.executables_dir, str) or not self.executables_dir):
            fail(self, "executables_dir", "must be a folder's name")
        check_int(self, "seed", minimum=0, maximum=2**63 - 1)
        buckets = self.prefill_token_buckets
        if not buckets or list(buckets) != sorted(set(buckets)):
            fail(self, "prefill_token_buckets", "must be rising and hold at least one size")
        if any(b % self.query_block for b in buckets):
            fail(self, "prefill_token_buckets", f"must be multiples of query_block={self.query_block}")
        sizes = self.decode_sizes
        if list(sizes) != sorted(set(sizes)) or sizes[-1] != self.max_num_seqs:
            fail(self, "decode_slot_buckets", f"must be rising and end with max_num_seqs={self.max_num_seqs}")
        if self.max_decode_steps > self.page_size:
            # one dispatch may then need more than one new page a slot, which the step input cannot hold
            fail(self, "max_decode_steps", f"is above page_size={self.page_size}")
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            fail(self, "num_pages", f"contradicts kv_cache_bytes={self.kv_cache_bytes}: give one of them")

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Slot counts of the decode programs, rising."""
        return self.decode_slot_buckets or (self.max_num_seqs,)
