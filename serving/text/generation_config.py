"""Defaults of sampling from a model's generation_config.json, and the ids that end its output.

A sampling field comes from the first that gives it: the request, a server flag, generation_config.json, the defaults
of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from configs.checks import ConfigError
from serving.request import RequestError, SamplingParams

_FILE = "generation_config.json"

# Key of the file: field of SamplingParams.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "suppress_tokens": "banned_token_ids",
}
_ONLY_WHEN_SAMPLING = ("temperature", "top_p", "top_k", "min_p")

# Keys that change which tokens come out and that this engine does not offer, with the values that change nothing.
_UNSUPPORTED_KEYS: dict[str, Collection[Any]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ([], {}),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "begin_suppress_tokens": ([],),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "min_length": (0,),
    "dola_layers": (),
}


def default_sampling(
    generation_config: Mapping[str, Any],
    *,
    server_flags: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    **request: Any,
) -> SamplingParams:
    """Sampling of a request: the fields it gives, then `server_flags`, then the model's, then the engine's defaults.

    `generation_config` is the content of generation_config.json, `server_flags` and `request` are fields of
    SamplingParams, `max_model_len` the engine's context in tokens. Raises ConfigError as `default_fields` does, and
    RequestError for the request's own fields.
    """
    return SamplingParams(**{**default_fields(generation_config, server_flags, max_model_len=max_model_len), **request})


def default_fields(
    generation_config: Mapping[str, Any],
    server_flags: Mapping[str, Any] | None = None,
    *,
    max_model_len: int | None = None,
) -> dict[str, Any]:
    """Fields of SamplingParams that hold where a request gives none; a server checks its model with this at start.

    `do_sample: false` makes greedy the default. Keys with null count as absent. The file's `max_new_tokens` means up
    to the context's end (None) where `max_model_len` tokens of context do not hold it: it was written for a longer one,
    and would refuse every request. Raises ConfigError on a wrong type or value, on a key of sampling that is not
    supported, and on a flag that is no field. Keys that have no part in sampling (see `ignored_keys`) are left alone.
    """
    given = {key: value for key, value in generation_config.items() if value is not None}
    for key, neutral in _UNSUPPORTED_KEYS.items():
        if key in given and given[key] not in neutral:
            raise ConfigError(f"{_FILE} {key}={given[key]!r} is not supported")
    do_sample = given.get("do_sample", True)
    if not isinstance(do_sample, bool):
        raise ConfigError(f"{_FILE} do_sample must be true or false, got {do_sample!r}")
    from_file = {
        field: tuple(given[key]) if isinstance(given[key], list) else given[key]
        for key, field in _SAMPLING_KEYS.items()
        if key in given and (do_sample or key not in _ONLY_WHEN_SAMPLING)
    }
    if not do_sample:
        from_file["temperature"] = 0.0
    if "min_tokens" in from_file:
        from_file.setdefault("max_tokens", None)  # the engine's default may be below the model's own minimum
    flags = dict(server_flags or {})
    unknown = set(flags) - {field.name for field in fields(SamplingParams)}
    if unknown:
        raise ConfigError(f"no such sampling field: {', '.join(sorted(unknown))}")
    for source, values in ((_FILE, from_file), ("server flag", flags)):
        try:
            SamplingParams(**{"max_tokens": None, **values})
        except RequestError as error:
            raise ConfigError(f"{source}: {error}") from error
    max_tokens = from_file.get("max_tokens")
    if max_model_len is not None and isinstance(max_tokens, int) and max_tokens >= max_model_len:
        from_file["max_tokens"] = None
    return {**from_file, **flags}


def ignored_keys(generation_config: Mapping[str, Any]) -> list[str]:
    """Keys without a part in sampling: token ids, versions, caching, `max_length` (the model's context bounds it)."""
    known = {*_SAMPLING_KEYS, *_UNSUPPORTED_KEYS, "do_sample", "eos_token_id"}
    return sorted(key for key in generation_config if key not in known)


def eos_token_ids(
    *configs: Mapping[str, Any], tokenizer_eos_token_ids: Collection[int] = (), vocab_size: int
) -> tuple[int, ...]:
    """Ids that end the output: of each config's `eos_token_id` (an id, a list or null) and the tokenizer's, united.

    `configs`: generation_config.json and config.json. Raises ConfigError on an id outside [0, vocab_size).
    """
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        values = [] if value is None else value if isinstance(value, list | tuple) else [value]
        for token_id in values:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ConfigError(f"eos_token_id must hold ids in [0, {vocab_size}), got {token_id!r}")
        ids += values
    return tuple(dict.fromkeys((*ids, *tokenizer_eos_token_ids)))
