"""What a Scheduler must know of the engine's sizes and of the model's rope. Frozen, and checks itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.checks import check_bool, check_int, check_int_tuple, fail
from configs.engine import mixed_decode_sizes
from configs.scheduling import SchedulingConfig
from serving.request import Request


@dataclass(frozen=True, kw_only=True)
class RopeRegime:
    """How far K/V depend on a sequence's length. Without limits they do not, which holds for most models.

    longrope (Ding et al. 2024, LongRoPE) turns every key by short factors while the sequence has at most
    `longrope_limit` tokens and by long factors once it has more: crossing the limit makes all its K/V wrong.
    Dynamic NTK scaling raises the base of a prompt longer than `dynamic_limit` by the prompt's length: K/V of such
    a prompt serve only prompts of that very length. Raises ConfigError.
    """

    longrope_limit: int | None = None  # tokens; the model's original_max_position_embeddings
    dynamic_limit: int | None = None  # tokens

    def __post_init__(self) -> None:
        check_int(self, "longrope_limit", minimum=1, optional=True)
        check_int(self, "dynamic_limit", minimum=1, optional=True)
        if self.longrope_limit is not None and self.dynamic_limit is not None:
            fail(self, "longrope_limit", f"contradicts dynamic_limit={self.dynamic_limit}: a rope is of one type")

    def rope_len(self, request: Request) -> int:
        """What `request.rope_len` must be when the request is computed from position 0 as it stands now."""
        is_long = self.longrope_limit is not None and request.num_tokens > self.longrope_limit
        return request.num_tokens if is_long else 0

    def max_tokens(self, request: Request) -> int:
        """Positions [0, max_tokens) may be computed before the request must restart from position 0."""
        if self.longrope_limit is None or max(request.num_prompt_tokens, request.rope_len) > self.longrope_limit:
            return request.max_total_tokens
        return min(self.longrope_limit, request.max_total_tokens)

    def salt(self, request: Request) -> bytes:
        """Two requests whose equal tokens have different K/V have different salts, which hold no '/'."""
        if self.longrope_limit is not None:
            is_long = max(request.num_prompt_tokens, request.rope_len) > self.longrope_limit
            return b"long" if is_long else b"short"
        if self.dynamic_limit is not None and request.num_prompt_tokens > self.dynamic_limit:
            return b"prompt of %d" % request.num_prompt_tokens
        return b""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and switches of one Scheduler. Raises ConfigError on a value out of range or a contradiction."""

    page_size: int  # tokens
    num_pages: int  # of the pool, null page included
    decode_sizes: tuple[int, ...]  # slots that a decode step may run over, rising; the last is all there are
    max_model_len: int  # tokens, prompt + output
    prefill_token_buckets: tuple[int, ...]  # rising; the largest is what one step may prefill
    query_block: int  # a chunk takes a multiple of this many tokens of the bucket
    max_decode_steps: int = 1  # a dispatch decodes 1 or this many steps; at most page_size
    enable_prefix_caching: bool = True
    rope: RopeRegime = RopeRegime()
    policy: SchedulingConfig = field(default_factory=SchedulingConfig)
    static_batching: bool = False  # admit only into an empty engine: the classic baseline, for comparison

    def __post_init__(self) -> None:
        for name in ("page_size", "query_block", "max_decode_steps"):
            check_int(self, name, minimum=1)
        check_int(self, "num_pages", minimum=2)
        check_int(self, "max_model_len", minimum=2)
        for name in ("decode_sizes", "prefill_token_buckets"):
            check_int_tuple(self, name, minimum=1)
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)):
                fail(self, name, "must be rising and hold at least one size")
        check_bool(self, "enable_prefix_caching")
        check_bool(self, "static_batching")
        if any(size % self.query_block for size in self.prefill_token_buckets):
            fail(self, "prefill_token_buckets", f"must be multiples of query_block={self.query_block}")
        if self.max_decode_steps > self.page_size:
            fail(self, "max_decode_steps", f"is above page_size={self.page_size}: a slot gets one new page a step")

    @property
    def max_num_seqs(self) -> int:
        """Slots."""
        return self.decode_sizes[-1]

    @property
    def max_prefill_tokens(self) -> int:
        """Tokens that one step may prefill, padding to query_block included."""
        return self.prefill_token_buckets[-1]

    def decode_size(self, num_slots: int, prefill_bucket: int) -> int:
        """The smallest program, decode or with a prefill bucket mixed, that holds the first `num_slots` slots."""
        sizes = mixed_decode_sizes(self.decode_sizes, prefill_bucket) if prefill_bucket else self.decode_sizes
        return next(size for size in sizes if size >= num_slots)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
