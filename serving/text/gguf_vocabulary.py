"""Tokenizers from GGUF metadata (`tokenizer.ggml.*`): byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Where a file leaves something unsaid, the rule is llama.cpp's, whose converters write these files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from serving.text.base import BaseTokenizer, TokenizerError, TokenizerInfo
from serving.text.library_tokenizer import LibraryTokenizer, library_errors
from serving.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from serving.text.sentencepiece_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceTokenizer,
    build_model_proto,
    load_processor,
)
from serving.text.special_text import SpecialToken, looks_special

# Texts of end-of-turn tokens. Converters often record only one end token, the one of plain text.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
)

# Phi-3's markers swallow white space to their right, but for these (tokenizer.json of microsoft/Phi-3-mini-4k-instruct).
_PHI3_MARKERS = ("<|assistant|>", "<|placeholder1|>", "<|end|>")
_PHI3_NO_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> BaseTokenizer | None:
    """The tokenizer that GGUF metadata describes, or None where it says that there is none.

    Raises TokenizerError on an unknown vocabulary model or pre-tokenizer, or metadata that contradicts itself.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    builders: dict[object, Callable[[_Vocabulary], BaseTokenizer]] = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    if not isinstance(model, str) or model not in builders:
        raise TokenizerError(
            f"tokenizer.ggml.model={model!r} is not supported; supported are {', '.join(map(str, builders))}"
        )
    return builders[model](_Vocabulary(metadata))


class _Vocabulary:
    """The checked lists: `tokens`, `types` (one a token) and the metadata they came from."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        self.tokens = self.strings("tokens")
        if not self.tokens:
            raise TokenizerError("tokenizer.ggml.tokens is missing or empty")
        # llama.cpp names empty tokens this way
        self.tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(self.tokens)]
        if len(set(self.tokens)) != len(self.tokens):
            twice = next(token for token, count in Counter(self.tokens).items() if count > 1)
            raise TokenizerError(f"tokenizer.ggml.tokens holds {twice!r} twice")
        self.types = [int(value) for value in self.numbers("token_type") or [NORMAL] * len(self.tokens)]
        if len(self.types) != len(self.tokens) or not set(self.types) <= set(range(NORMAL, BYTE + 1)):
            raise TokenizerError(
                f"tokenizer.ggml.token_type must hold a type from {NORMAL} to {BYTE} for each of {len(self.tokens)} tokens"
            )
        for key in ("add_sep_token", "remove_extra_whitespaces"):
            if self.flag(key, default=False):
                raise TokenizerError(f"tokenizer.ggml.{key}=True is not supported")

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def strings(self, key: str) -> list[str]:
        values = self.get(key)
        values = [] if values is None else list(values)
        if not all(isinstance(value, str) for value in values):
            raise TokenizerError(f"tokenizer.ggml.{key} must be a list of strings")
        return values

    def numbers(self, key: str) -> list[float]:
        values = self.get(key)
        values = [] if values is None else list(values)
        try:
            if all(map(math.isfinite, values)):
                return values
        except TypeError:
            pass
        raise TokenizerError(f"tokenizer.ggml.{key} must be a list of finite numbers")

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if value not in (True, False):
            raise TokenizerError(f"tokenizer.ggml.{key} must be true or false, got {value!r}")
        return bool(value)

    def token_id(self, key: str, *, default: int | None = None) -> int | None:
        value = self.get(f"{key}_token_id")
        if value is None:
            return default if default is not None and default < len(self.tokens) else None
        if isinstance(value, bool | str | list) or not 0 <= int(value) < len(self.tokens):
            raise TokenizerError(f"tokenizer.ggml.{key}_token_id={value!r} is outside the {len(self.tokens)} tokens")
        return int(value)

    def special(self, *, rstrip: Callable[[str], bool] = lambda text: False) -> list[SpecialToken]:
        """Control and unknown tokens, and user-defined ones that are control tokens by their look."""
        return [
            SpecialToken(token_id=token_id, text=text, rstrip=rstrip(text), visible=token_type == USER_DEFINED)
            for token_id, (text, token_type) in enumerate(zip(self.tokens, self.types, strict=True))
            if token_type in (CONTROL, UNKNOWN) or (token_type == USER_DEFINED and looks_special(text))
        ]

    def info(self, *, add_bos: bool, ids: Mapping[str, int | None]) -> TokenizerInfo:
        """`ids`: the file's, or its vocabulary model's, bos, eos, unknown and padding ids."""
        bos, eos = ids["bos"], ids["eos"]
        prefix = self._added("add_bos_token", default=add_bos, token_id=bos)
        suffix = self._added("add_eos_token", default=False, token_id=eos)
        template = self.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"tokenizer.chat_template must be a string, got {type(template).__name__}")
        ends = [eos, self.token_id("eot"), self.token_id("eom")]
        if template is not None:
            ends += [self.tokens.index(text) for text in _END_OF_TURN if text in template and text in self.tokens]
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        return TokenizerInfo(
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
            prefix_ids=prefix,
            suffix_ids=suffix,
            special_tokens={
                f"{name}_token": self.tokens[token_id]
                for name, key in names.items()
                if (token_id := ids[key]) is not None
            },
            chat_template=template,
            named_chat_templates={
                key.removeprefix("tokenizer.chat_template."): value
                for key, value in self.metadata.items()
                if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
            },
        )

    def _added(self, key: str, *, default: bool, token_id: int | None) -> tuple[int, ...]:
        if not self.flag(key, default=default):
            return ()
        if token_id is None:
            raise TokenizerError(f"tokenizer.ggml.{key} is set, but the file names no such token")
        return (token_id,)


def _byte_level_bpe(vocabulary: _Vocabulary) -> LibraryTokenizer:
    tag = vocabulary.get("pre")
    if tag is None:
        raise TokenizerError(
            "tokenizer.ggml.pre is missing: without the pre-tokenizer's name text would be split wrongly; convert the "
            "model again with a converter that writes it"
        )
    if tag not in PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre={tag!r} is not known; known are {', '.join(PRE_TOKENIZERS)}")
    pre_tokenizer = PRE_TOKENIZERS[tag]
    special = vocabulary.special()
    # The model of ordinary text has no control tokens, so that no ordinary text can become one.
    special_ids = {token.token_id for token in special}
    ordinary = {text: token_id for token_id, text in enumerate(vocabulary.tokens) if token_id not in special_ids}
    added = [
        SpecialToken(token_id=token_id, text=text)
        for text, token_id in ordinary.items()
        if vocabulary.types[token_id] == USER_DEFINED
    ]
    ids = {key: vocabulary.token_id(key) for key in ("bos", "eos", "unknown", "padding")}
    return LibraryTokenizer(
        _library_bpe(ordinary, vocabulary.strings("merges"), pre_tokenizer, added),
        vocabulary.info(add_bos=pre_tokenizer.add_bos and ids["bos"] is not None, ids=ids),
        vocab_size=len(vocabulary.tokens),
        spelling="byte_level",
        special=special,
        added=added,
    )


def _library_bpe(
    vocabulary: dict[str, int], merges: list[str], pre_tokenizer: PreTokenizer, added: Iterable[SpecialToken]
) -> Any:
    import tokenizers
    from tokenizers import models, normalizers

    pairs = []
    for merge in merges:
        left, separator, right = merge.partition(" ")
        if not (left and separator and right) or left + right not in vocabulary:
            raise TokenizerError(f"tokenizer.ggml.merges holds {merge!r}, which joins no two tokens to a token")
        pairs.append((left, right))
    if not pairs:
        raise TokenizerError("tokenizer.ggml.merges is missing or empty")
    with library_errors("tokenizer.ggml.tokens and merges make no BPE vocabulary"):
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre_tokenizer.ignore_merges)
    library = tokenizers.Tokenizer(model)
    if pre_tokenizer.nfc:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizer.build()
    library.add_tokens([tokenizers.AddedToken(token.text, normalized=False, special=False) for token in added])
    return library


def _sentencepiece(vocabulary: _Vocabulary) -> SentencePieceTokenizer:
    tokens, types = vocabulary.tokens, vocabulary.types
    scores = vocabulary.numbers("scores")
    if len(scores) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.scores must hold a number for each of {len(tokens)} tokens")
    ids = {
        "bos": vocabulary.token_id("bos", default=1),
        "eos": vocabulary.token_id("eos", default=2),
        "unknown": vocabulary.token_id("unknown", default=0),
        "padding": vocabulary.token_id("padding"),
    }
    is_phi3 = set(_PHI3_MARKERS) <= set(tokens)
    special = vocabulary.special(rstrip=lambda text: is_phi3 and text not in _PHI3_NO_RSTRIP)
    special_ids = {token.token_id for token in special}
    user_defined = [
        SpecialToken(token_id=token_id, text=text, rstrip=is_phi3)
        for token_id, text in enumerate(tokens)
        if types[token_id] == USER_DEFINED and token_id not in special_ids
    ]
    adds_space = vocabulary.flag("add_space_prefix", default=True)
    # Text after a user-defined token gets its own space where spaces are added: then it must be found outside the
    # model. Elsewhere the model finds these tokens itself, faster (Gemma has one for each run of line feeds).
    outside = user_defined if adds_space else []
    hidden = special_ids | {token.token_id for token in outside}
    proto = build_model_proto(
        [text.replace(" ", "▁") for text in tokens],
        [float(score) for score in scores],
        [
            UNKNOWN if token_id == ids["unknown"] else CONTROL if token_id in hidden else token_type
            for token_id, token_type in enumerate(types)
        ],
    )
    return SentencePieceTokenizer(
        load_processor(proto, "tokenizer.ggml.tokens"),
        vocabulary.info(add_bos=True, ids=ids),
        special=special,
        always_special=outside,
        space_prefix="every_piece" if adds_space else "never",
    )
