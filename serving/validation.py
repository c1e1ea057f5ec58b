"""The one door: what a request must satisfy given the model. Every interface comes through here.

Errors are RequestError (serving.request) and name the field and the value; nothing refused here reaches the step loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from configs.model import ModelConfig
from serving.request import RequestError, SamplingParams, shown

MAX_REQUEST_ID_CHARS = 256
# Characters of a text a token of context. No known vocabulary comes near it on average over a text that fills a
# context (English: 4 to 5), and beyond it a text is refused before it is encoded, which could take minutes.
MAX_CHARS_PER_TOKEN = 64


def check_request_id(request_id: object) -> str:
    """A client's own name for its request."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise RequestError("request_id", f"must be a string of 1 to {MAX_REQUEST_ID_CHARS} characters")
    return str.__str__(request_id)  # the text alone: a subclass may hash and compare in its own way


def check_text_length(text: str, max_model_len: int) -> None:
    """Refuse a text that is far beyond the context without encoding it."""
    if len(text) > max_model_len * MAX_CHARS_PER_TOKEN:
        raise RequestError(
            "prompt",
            f"has {len(text)} characters; the context holds {max_model_len} tokens, and more than "
            f"{MAX_CHARS_PER_TOKEN} characters a token are not accepted",
        )


def check_prompt_ids(token_ids: object, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """A prompt as token ids: a sequence of integers in [0, vocab_size), not empty and no longer than the context."""
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise RequestError("prompt_token_ids", f"must be a list of integers, got {type(token_ids).__name__}")
    if len(token_ids) > max_model_len:  # before they are read one by one
        raise RequestError(
            "prompt", f"has {len(token_ids)} tokens; the context holds {max_model_len} (prompt and output)"
        )
    given = tuple(token_ids)  # read once: a list may change, and a subclass may do anything, while it is checked
    if not given:
        raise RequestError("prompt_token_ids", "is empty: there is nothing to continue")
    for i, token_id in enumerate(given):
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise RequestError(f"prompt_token_ids[{i}]", f"must be an integer, got {shown(token_id)}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt_token_ids[{i}]", f"{shown(token_id)} is outside the vocabulary [0, {vocab_size})"
            )
    return tuple(int(token_id) for token_id in given)


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
    if params.use_beam_search and 2 * params.n > max_logprobs:
        raise RequestError(
            "n", f"{params.n} beams need {2 * params.n} log-probs a token; this engine's max_logprobs is {max_logprobs}"
        )
    if params.stop and not has_tokenizer:
        raise RequestError("stop", f"{params.stop[0]!r} needs a tokenizer, and this model has none")
    if params.structured is not None and not has_tokenizer:
        raise RequestError("structured", "needs a tokenizer, and this model has none")
    if params.structured is not None and params.max_tokens == 0:
        raise RequestError("structured", "is for an output, and max_tokens=0 asks for none")


def check_tokens_left(params: SamplingParams, stop_token_ids: Collection[int], vocab_size: int) -> None:
    """Some token must be left to sample while min_tokens holds back those that stop."""
    if not params.min_tokens:
        return
    held_back = {*params.banned_token_ids, *stop_token_ids}
    if params.allowed_token_ids is not None and held_back.issuperset(params.allowed_token_ids):
        raise RequestError("min_tokens", f"{params.min_tokens} holds back every token of allowed_token_ids")
    if len(held_back) >= vocab_size:
        raise RequestError("min_tokens", f"{params.min_tokens} holds back every token that is not banned")


def max_total_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """Prompt + output bound of a request whose prompt went through `check_prompt_ids`.

    Raises RequestError where it does not fit the context.
    """
    if params.max_tokens == 0:
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
