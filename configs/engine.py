"""EngineConfig: how one engine holds memory and batches work. MeshConfig: how its devices are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.checks import check_bool, check_choice, check_float, check_int, check_int_tuple, fail

DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("auto", "float8_e4m3fn", "int8")
KV_SCALES = ("per_token_head", "per_tensor")
PREFIX_CACHE_SCOPES = ("shared", "tenant")
PREEMPTIONS = ("auto", "recompute", "swap")
MIXED_SAVING = 72  # a smaller mixed program must do without at least one in so many rows of the next


def mixed_decode_sizes(decode_sizes: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Slot counts of the mixed programs that prefill `num_tokens` tokens, rising.

    The largest decode size, and from there down each that leaves out at least one in MIXED_SAVING of the rows (tokens
    and slots) of the next one kept. So small buckets have several, and large ones, where slots hardly count, have one.
    A size of 1 is left out: a mixed step has a slot that decodes and another whose prompt is prefilled.
    """
    kept = [decode_sizes[-1]]
    for size in reversed(decode_sizes[:-1]):
        if size > 1 and (kept[0] - size) * MIXED_SAVING >= kept[0] + num_tokens:
            kept.insert(0, size)
    return tuple(kept)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the device mesh's axes. Raises ConfigError."""

    data: int = 1  # copies of the model; more than 1 is refused: run an engine for each
    tensor: int = 1  # devices that heads, MLPs and the vocabulary are split over
    expert: int = 1  # devices that experts are split over; more than 1 is refused: models are dense

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
    # What keys and values are kept in. "auto": as dtype. Else quantised, and then a result depends on more than float
    # rounding: a value that falls on the other side of a step moves by the whole step.
    kv_dtype: Literal["auto", "float8_e4m3fn", "int8"] = "auto"
    # Scales of quantised KV: one for each token and head from its largest value, or 1.0 for all (float8_e4m3fn only:
    # values beyond 448 become 448). None: per_token_head where kv_dtype quantises.
    kv_scales: Literal["per_token_head", "per_tensor"] | None = None
    page_size: int = 16  # tokens of a KV page
    max_model_len: int | None = None  # tokens, prompt + output; None: the model's own limit
    max_num_seqs: int = 8  # slots: sequences that decode at once
    # Slots that a decode step may run over, rising to max_num_seqs; the smallest that holds every running slot is taken.
    # Programs for each, mixed ones where it saves a 72nd of the pass's rows. None: max_num_seqs alone. With
    # several, a row's bits depend on how many others run: products differ with size.
    decode_slot_buckets: tuple[int, ...] | None = None
    prefill_token_buckets: tuple[int, ...] = (64, 512)  # tokens a step may prefill; programs for each
    query_block: int = 32  # prefill tokens a row of the attention call; divides every bucket
    max_decode_steps: int = 8  # decode steps in one dispatch, while that holds up no admission to speak of
    num_pages: int | None = None  # of the KV pool; None: what fits memory
    memory_fraction: float = 0.9  # of the device's memory that weights, workspace and KV may fill
    kv_cache_bytes: int | None = None  # bound on the KV pool; None: what memory_fraction leaves
    # Host memory for the KV of preempted sequences, all devices' together; 0: none, they are computed again.
    swap_bytes: int = 0
    # What becomes of a preempted sequence's KV. "auto": it is swapped to the host, where there is room, if its bytes
    # take less time both ways than its tokens to compute, by rates measured at start; "swap": wherever there is room.
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    enable_prefix_caching: bool = True  # keep full pages of finished sequences for prompts that begin alike
    # Who finds whose cached prefixes: "shared" all requests, "tenant" those of one tenant alone. None: "tenant" in a
    # server that tells tenants apart, else "shared".
    prefix_cache_scope: Literal["shared", "tenant"] | None = None
    # Share of the pool up to which a tenant's cached pages are not given up for other tenants' requests while those find
    # room elsewhere; at most half of the pool is kept so.
    prefix_cache_floor: float = 0.0
    # A waiting request whose prompt begins with so many more tokens than are cached, which a running one is computing,
    # waits for them instead of computing them too. None: never.
    prefix_wait_tokens: int | None = 256
    max_pinned_pages: int = 0  # of the pool that pinned prefixes may hold; no request may count on them
    max_logprobs: int = 20  # most alternatives a token that a request may ask for
    seed: int = 0  # from which requests without a seed get theirs
    compilation_cache_dir: str | None = None  # of compiled programs; None: the user's cache folder; "": none
    executables_dir: str | None = None  # what `headrace compile` wrote: used where it fits, and trusted like a program

    def __post_init__(self) -> None:
        check_choice(self, "dtype", DTYPES)
        check_choice(self, "kv_dtype", KV_DTYPES)
        check_choice(self, "kv_scales", KV_SCALES, optional=True)
        if self.kv_scales is not None and self.kv_dtype == "auto":
            fail(self, "kv_scales", f"is for quantised KV: kv_dtype='auto' keeps it in dtype={self.dtype!r} as it is")
        if self.kv_scales == "per_tensor" and self.kv_dtype == "int8":
            fail(self, "kv_scales", "is 1.0 for all, which leaves of most values nothing in kv_dtype='int8'")
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
        check_int(self, "swap_bytes", minimum=0)
        check_choice(self, "preemption", PREEMPTIONS)
        if self.preemption == "swap" and not self.swap_bytes:
            fail(self, "preemption", "needs host memory: give swap_bytes")
        if self.preemption == "recompute" and self.swap_bytes:
            fail(self, "swap_bytes", "is for preemption='auto' or 'swap': 'recompute' has no use for it")
        check_bool(self, "enable_prefix_caching")
        self._check_prefix_cache()
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

    def _check_prefix_cache(self) -> None:
        check_choice(self, "prefix_cache_scope", PREFIX_CACHE_SCOPES, optional=True)
        check_float(self, "prefix_cache_floor", minimum=0.0, maximum=1.0)
        check_int(self, "prefix_wait_tokens", minimum=1, optional=True)
        check_int(self, "max_pinned_pages", minimum=0)
        if not self.enable_prefix_caching:
            for field in ("prefix_cache_scope", "prefix_cache_floor", "max_pinned_pages"):
                if getattr(self, field):
                    fail(self, field, "contradicts enable_prefix_caching=False")

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Slot counts of the decode programs, rising."""
        return self.decode_slot_buckets or (self.max_num_seqs,)

    @property
    def kv_format(self) -> tuple[str, str | None]:
        """(dtype of the KV pool, its scales): "per_token_head", "per_tensor", or None where it is not quantised."""
        if self.kv_dtype == "auto":
            return self.dtype, None
        return self.kv_dtype, self.kv_scales or "per_token_head"
