from __future__ import annotations

import pytest

from configs.checks import ConfigError
from serving.scheduling.config import RopeRegime


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("num_pages", 1),
        ("decode_sizes", ()),
        ("decode_sizes", (0,)),
        ("decode_sizes", (8, 4)),
        ("max_model_len", 1),
        ("prefill_token_buckets", ()),
        ("prefill_token_buckets", (16, 8)),
        ("prefill_token_buckets", (10,)),  # query_block is 4
        ("query_block", 0),
        ("max_decode_steps", 5),  # page_size is 4
        ("enable_prefix_caching", 1),
        ("static_batching", None),
        ("prefix_cache_scope", "all"),
        ("prefix_cache_floor", 1.5),
        ("prefix_wait_tokens", 0),
        ("max_pinned_pages", -1),
    ],
)
def test_a_wrong_size_is_refused_by_name_and_value(tools, field, value):
    with pytest.raises(ConfigError, match=rf"SchedulerConfig\.{field}.*"):
        tools.make_config(**{field: value})


def test_a_rope_has_at_most_one_limit():
    with pytest.raises(ConfigError, match="dynamic_limit=8"):
        RopeRegime(longrope_limit=4, dynamic_limit=8)
    with pytest.raises(ConfigError, match="longrope_limit"):
        RopeRegime(longrope_limit=0)


def test_longrope_changes_regime_one_token_after_its_limit(tools):
    rope = RopeRegime(longrope_limit=8)
    for num_tokens, rope_len, salt, max_tokens in ((4, 0, b"short", 8), (8, 0, b"short", 8), (9, 9, b"long", 17)):
        request = tools.make_request("r", range(num_tokens), max_tokens=8)
        request.rope_len = rope.rope_len(request)
        assert (request.rope_len, rope.salt(request), rope.max_tokens(request)) == (rope_len, salt, max_tokens)


def test_dynamic_rope_separates_long_prompts_by_their_length(tools):
    rope = RopeRegime(dynamic_limit=8)
    salts = [rope.salt(tools.make_request("r", range(num_tokens))) for num_tokens in (3, 8, 9, 10)]
    assert salts[0] == salts[1] == b""
    assert len(set(salts)) == 3
    assert rope.rope_len(tools.make_request("r", range(10))) == 0
