r"""How byte-level BPE vocabularies in GGUF files split text into words, by their `tokenizer.ggml.pre` tag.

A GGUF file names its pre-tokenizer and does not hold it. The expressions are those of the models' own
tokenizer.json files, as llama.cpp's llama-vocab.cpp records them beside each tag (MIT). Each expression splits
further what the ones before it left; what an expression does not match stays a piece. A wrong one changes ids
quietly (digits, accents, runs of spaces), so a tag that is not here is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    splits: tuple[str, ...]  # Oniguruma expressions, in order
    nfc: bool = False  # text is brought into Unicode normal form C first
    ignore_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # where the file does not say

    def build(self) -> Any:
        """The `tokenizers` pre-tokenizer: splits text, and spells it in the byte-level alphabet."""
        import tokenizers
        from tokenizers import pre_tokenizers

        splits = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in self.splits]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _END
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _END
_QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _CASED_END
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}" + _CASED_END
)
# Letters of alphabets with upper and lower case, as ranges.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531"
    "-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400"
    "-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0"
    "-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_DIGITS_GPT2 = PreTokenizer(splits=(r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer(splits=(_GPT2,))
_LLAMA3_BOS = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_NFC = PreTokenizer(splits=(_QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "mpt": PreTokenizer(splits=(_GPT2,), nfc=True),
    "olmo": PreTokenizer(splits=(_GPT2,), nfc=True),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "command-r": PreTokenizer(splits=(r"\p{N}", _GPT2), nfc=True),
    "falcon": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama3": _LLAMA3_BOS,
    "llama-v3": _LLAMA3_BOS,
    "llama-bpe": _LLAMA3_BOS,
    "falcon3": _LLAMA3_BOS,
    "pixtral": _LLAMA3_BOS,
    "lfm2": _LLAMA3_BOS,
    "dbrx": PreTokenizer(splits=(_LLAMA3,)),
    "smaug-bpe": PreTokenizer(splits=(_LLAMA3,)),
    "chatglm-bpe": PreTokenizer(splits=(_LLAMA3,)),
    "glm4": PreTokenizer(splits=(_LLAMA3,), ignore_merges=True),
    "qwen2": _QWEN2_NFC,
    "deepseek-r1-qwen": _QWEN2_NFC,
    "megrez": _QWEN2_NFC,
    "stablelm2": PreTokenizer(splits=(_QWEN2,)),
    "grok-2": PreTokenizer(splits=(_QWEN2,)),
    "qwen35": PreTokenizer(splits=(_QWEN35,)),
    "tekken": PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer(splits=(_GPT4O,)),
    "llama4": PreTokenizer(splits=(_GPT4O,)),
    "deepseek-llm": PreTokenizer(
        splits=(
            "[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(splits=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        splits=(
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}
