"""The one door: what a request must satisfy given the model. Every interface comes through here.

Errors are RequestError (serving.request) and name the field and the value; nothing refused here reaches the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from configs.model import ModelConfig
from serving.request import RequestError, SamplingParams


def check_prompt_ids(token_ids: object, vocab_size: int) -> tuple[int, ...]:
    """A prompt as token ids: a sequence of integers in [0, vocab_size), not empty."""
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise RequestError("prompt_token_ids", f"must be a list of integers, got {type(token_ids).__name__}")
    if not token_ids:
        raise RequestError("prompt_token_ids", "is empty: there is nothing to continue")
    for i, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise RequestError(f"prompt_token_ids[{i}]", f"must be an integer, got {str(token_id)[:80]!r}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"prompt_token_ids[{i}]", f"{token_id} is outside the vocabulary [0, {vocab_size})")
    return tuple(int(t) for t in token_ids)


def check_params(params: SamplingParams, model: ModelConfig, *, max_logprobs: int, has_tokenizer: bool) -> None:
    """Sampling settings against the vocabulary and the server's limits."""
    vocab_size = model.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            if token_id >= vocab_size:
                raise RequestError(name, f"{token_id} is outside the vocabulary [0, {vocab_size})")
    if len(set(params.banned_token_ids)) >= vocab_size:
        raise RequestError("banned_token_ids", f"bans all {vocab_size} tokens")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > max_logprobs:
            raise RequestError(name, f"{value} is above this engine's max_logprobs={max_logprobs}")
    if params.stop and not has_tokenizer:
        raise RequestError("stop", f"{params.stop[0]!r} needs a tokenizer, and this model has none")


def max_total_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """Prompt + output bound of a request. Raises RequestError where it does not fit the context."""
    if params.max_tokens == 0:
        if num_prompt_tokens > max_model_len:
            raise RequestError(
                "prompt", f"has {num_prompt_tokens} tokens; the context holds {max_model_len} (prompt and output)"
            )
        return num_prompt_tokens
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            "prompt",
            f"has {num_prompt_tokens} tokens; the context holds {max_model_len}, prompt and output, "
            f"so a prompt may have at most {max_model_len - 1}",
        )
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise RequestError("min_tokens", f"{params.min_tokens} does not fit: {room} tokens are left of the context")
        return max_model_len
    if params.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{params.max_tokens} and a prompt of {num_prompt_tokens} tokens exceed the context of {max_model_len}",
        )
    return num_prompt_tokens + params.max_tokens
