"""Tokenizers from a model folder: tokenizer.json, or tokenizer.model, with the JSON files beside them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError, shown
from checkpoints.files import exists_in_folder, open_in_folder
from serving.text.base import BaseTokenizer, SpacePrefix, TokenizerError, TokenizerInfo
from serving.text.library_tokenizer import LibraryTokenizer, Spelling, library_errors
from serving.text.sentencepiece_tokenizer import SentencePieceTokenizer, load_processor
from serving.text.special_text import SpecialToken, looks_special

MAX_VOCABULARY_BYTES = 512 * 2**20  # of tokenizer.json or tokenizer.model
MAX_JSON_BYTES = 64 * 2**20  # of the files beside it
MAX_TEMPLATE_CHARS = 2**20  # longer chat templates are cut here, and then refused where they are used
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_FORMS = ("tekken.json", "vocab.json", "merges.txt", "spiece.model", "vocab.txt", "qwen.tiktoken")


def tokenizer_from_folder(folder: Path) -> BaseTokenizer | None:
    """The tokenizer in `folder`, or None where there is no tokenizer file. Raises TokenizerError."""
    has_library_file = exists_in_folder(folder, "tokenizer.json")
    if not has_library_file and not exists_in_folder(folder, "tokenizer.model"):
        others = [name for name in _OTHER_FORMS if exists_in_folder(folder, name)]
        if others:
            raise TokenizerError(f"{folder} holds {others[0]}, but neither tokenizer.json nor tokenizer.model")
        return None
    files = _SideFiles(folder)
    return _from_library_file(files) if has_library_file else _from_sentencepiece_file(files)


class _SideFiles:
    """What tokenizer_config.json and its neighbours say."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = _read_json(folder, "tokenizer_config.json")
        named = {**_read_json(folder, "special_tokens_map.json"), **self.config}
        self.special_tokens = {
            key: text for key in _NAMED_TOKENS if (text := _token_text(self._source(key), named.get(key)))
        }
        self.other_special: set[str] = set()
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = named.get(key)
            if tokens is not None and not isinstance(tokens, list | dict):
                raise TokenizerError(f"{self._source(key)} must be a list or an object of tokens, got {shown(tokens)}")
            values = tokens.values() if isinstance(tokens, dict) else tokens or ()
            self.other_special |= {text for token in values if (text := _token_text(self._source(key), token))}
        self.added = self._added_tokens()
        self.chat_template, self.named_chat_templates = self._chat_templates()

    def _source(self, key: str) -> str:
        """The file and key that name a special token, for messages."""
        return f"{'tokenizer_config.json' if key in self.config else 'special_tokens_map.json'} {key}"

    def flag(self, key: str) -> bool | None:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise TokenizerError(f"tokenizer_config.json {key} must be true or false, got {shown(value)}")
        return value

    def names(self, token: SpecialToken) -> bool:
        """Whether the token has a special part by name: bos_token, additional_special_tokens, ..."""
        return token.text in self.special_tokens.values() or token.text in self.other_special

    def info(self, token_ids: Mapping[str, int], prefix: tuple[int, ...], suffix: tuple[int, ...]) -> TokenizerInfo:
        """`token_ids`: of the texts of bos_token and eos_token; `prefix`, `suffix`: where the files do not say."""
        bos, eos = (self._named_id(key, token_ids) for key in ("bos_token", "eos_token"))
        for key, token_id in (("add_bos_token", bos), ("add_eos_token", eos)):
            flag = self.flag(key)
            if flag and token_id is None:
                raise TokenizerError(f"tokenizer_config.json {key} is true, but there is no such token")
            if flag is not None:
                added = (token_id,) if flag and token_id is not None else ()
                prefix, suffix = (added, suffix) if key == "add_bos_token" else (prefix, added)
        return TokenizerInfo(
            bos_token_id=bos,
            eos_token_ids=() if eos is None else (eos,),
            prefix_ids=prefix,
            suffix_ids=suffix,
            special_tokens=self.special_tokens,
            chat_template=self.chat_template,
            named_chat_templates=self.named_chat_templates,
        )

    def _named_id(self, key: str, token_ids: Mapping[str, int]) -> int | None:
        text = self.special_tokens.get(key)
        if text is not None and text not in token_ids:
            raise TokenizerError(f"{self._source(key)}={shown(text)} is not in the vocabulary")
        return None if text is None else token_ids[text]

    def _added_tokens(self) -> dict[int, tuple[SpecialToken, bool]]:
        """By id, the tokens that the files add to the vocabulary, each with whether it is flagged as special."""
        added: dict[int, tuple[SpecialToken, bool]] = {}
        for text, token_id in _read_json(self.folder, "added_tokens.json").items():
            token = _added_token("added_tokens.json", text, token_id)
            added[token.token_id] = (token, False)
        decoder = self.config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise TokenizerError("tokenizer_config.json added_tokens_decoder must be an object")
        for key, entry in decoder.items():
            entry = entry if isinstance(entry, dict) else {}
            flags = {name: entry.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
            token_id = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else key
            token = _added_token("tokenizer_config.json added_tokens_decoder", entry.get("content"), token_id, **flags)
            added[token.token_id] = (token, entry.get("special") is True)
        return added

    def _chat_templates(self) -> tuple[str | None, dict[str, str]]:
        """The default template and the others by name: from files first, then from tokenizer_config.json."""
        named: dict[str, str] = {}
        value = self.config.get("chat_template")
        if value is None:
            value = _read_json(self.folder, "chat_template.json").get("chat_template")
        if isinstance(value, list):
            for entry in value:
                if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
                    raise TokenizerError("tokenizer_config.json chat_template must hold objects with name and template")
                named[str(entry.get("name"))] = entry["template"]
        elif isinstance(value, str):
            named["default"] = value
        elif value is not None:
            raise TokenizerError("tokenizer_config.json chat_template must be a string or a list")
        if exists_in_folder(self.folder, "chat_template.jinja"):
            named["default"] = _read_template(self.folder, "chat_template.jinja")
        if exists_in_folder(self.folder, "additional_chat_templates"):
            more = self.folder / "additional_chat_templates"
            if more.is_symlink() or not more.is_dir():
                raise TokenizerError(f"{more}: is not a folder of its own")
            named |= {path.stem: _read_template(more, path.name) for path in sorted(more.glob("*.jinja"))}
        default = named.pop("default", None)
        return default, named


def _from_library_file(files: _SideFiles) -> LibraryTokenizer:
    import tokenizers

    path = files.folder / "tokenizer.json"
    content = _read(files.folder, path.name, max_bytes=MAX_VOCABULARY_BYTES)
    unusable = f"{path}: not a tokenizer that can be used"
    with library_errors(unusable):
        library = tokenizers.Tokenizer.from_buffer(content)
    del content
    library.no_truncation()  # the file may hold the settings of the training run
    library.no_padding()
    for token_id, (token, _) in sorted(files.added.items()):
        if library.token_to_id(token.text) is None:
            library.add_tokens([tokenizers.AddedToken(token.text, normalized=False)])
        if library.token_to_id(token.text) != token_id:
            raise TokenizerError(
                f"{path} gives {shown(token.text)} the id {library.token_to_id(token.text)}, and the files beside it {token_id}"
            )
    flagged = {token.text for token, is_special in files.added.values() if is_special}
    special, added = [], []
    for token_id, entry in library.get_added_tokens_decoder().items():
        token = SpecialToken(
            token_id=token_id,
            text=entry.content,
            lstrip=entry.lstrip,
            rstrip=entry.rstrip,
            single_word=entry.single_word,
        )
        is_flagged = entry.special or entry.content in flagged or files.names(token)
        if is_flagged or looks_special(token.text):
            special.append(replace(token, visible=not is_flagged))
            if not entry.special:  # so that the library no longer finds it in ordinary text
                library.add_special_tokens([tokenizers.AddedToken(entry.content, special=True, normalized=False)])
        else:
            added.append(token)
    known = {token.text for token in special}
    for text in (*files.special_tokens.values(), *files.other_special):
        named_id = library.token_to_id(text)
        if named_id is not None and text not in known:  # in the model's own vocabulary, named special beside it
            known.add(text)
            special.append(SpecialToken(token_id=named_id, text=text))
    vocabulary = library.get_vocab(with_added_tokens=True)
    with library_errors(unusable):
        prefix, suffix = _affixes(library)
    spelling, strips_space = _spelling(library, path)
    return LibraryTokenizer(
        library,
        files.info({text: vocabulary[text] for text in known if text in vocabulary}, prefix, suffix),
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        spelling=spelling,
        special=special,
        added=added,
        space_prefix=_take_over_space_prefix(library),
        strips_space=strips_space,
    )


def _affixes(library: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the file's post-processor puts before and after a text."""
    encoding = library.encode("a", add_special_tokens=True)
    ids, mask = encoding.ids, encoding.special_tokens_mask
    text_at = [index for index, is_special in enumerate(mask) if not is_special] or [len(ids)]
    return tuple(ids[: text_at[0]]), tuple(ids[text_at[-1] + 1 :])


def _spelling(library: Any, path: Path) -> tuple[Spelling, bool]:
    """How the vocabulary spells bytes, and whether decoding a whole text removes a leading space."""
    steps = _flat(_state(library.decoder), "decoders")
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse", "ByteFallback"}:
        return "byte_level", False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == "▁":
        return "sentencepiece", steps[0].get("prepend_scheme") != "never"
    replaces = [step for step in steps if step.get("type") == "Replace"]
    if (
        set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and [(step["pattern"], step["content"]) for step in replaces] == [({"String": "▁"}, " ")]
        and all(step["content"] == " " and step["stop"] == 0 for step in steps if step["type"] == "Strip")
    ):
        return "sentencepiece", any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
    raise TokenizerError(f"{path}: decoder {kinds or 'none'} is not supported: its tokens have no bytes of their own")


def _take_over_space_prefix(library: Any) -> SpacePrefix:
    """Turns off the space that the library adds at the start of a text, since it sees one piece of it at a time."""
    state = _state(library.pre_tokenizer)
    first = [
        step
        for step in _flat(state, "pretokenizers")
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"
    ]
    if not first:
        return "never"
    for step in first:
        step["prepend_scheme"] = "never"
    changed = library.pre_tokenizer
    changed.__setstate__(json.dumps(state).encode())
    library.pre_tokenizer = changed
    return "text_start"


def _state(component: Any) -> dict[str, Any]:
    """A library component as the JSON object it is in tokenizer.json."""
    state: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return state


def _flat(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if state.get("type") == "Sequence":
        return [step for inner in state[key] for step in _flat(inner, key)]
    return [state] if state else []


def _from_sentencepiece_file(files: _SideFiles) -> SentencePieceTokenizer:
    path = files.folder / "tokenizer.model"
    proto = _read(files.folder, path.name, max_bytes=MAX_VOCABULARY_BYTES)
    as_trained = load_processor(proto, str(path))
    if "▁▁" not in "".join(as_trained.encode("a  b", out_type=str)):
        raise TokenizerError(f"{path}: remove_extra_whitespaces is not supported: text would not come back as it was")
    adds_space = as_trained.encode("a", out_type=str)[0].startswith("▁") and files.flag("add_prefix_space") is not False
    # A field that a protocol buffer holds twice takes the later value: normalizer_spec {add_dummy_prefix: false}.
    processor = load_processor(proto + b"\x1a\x02\x18\x00", str(path))
    try:
        pieces = {processor.id_to_piece(token_id): token_id for token_id in range(processor.get_piece_size())}
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: a piece is not UTF-8: {error}") from error
    special = {
        token_id: SpecialToken(token_id=token_id, text=text)
        for text, token_id in pieces.items()
        if processor.is_control(token_id)
        or processor.is_unknown(token_id)
        or text in files.special_tokens.values()
        or text in files.other_special
    }
    always: dict[int, SpecialToken] = {}
    for token_id, (token, is_special) in files.added.items():
        is_flagged = is_special or files.names(token) or token_id in special
        if is_flagged or looks_special(token.text):
            special[token_id] = replace(token, visible=not is_flagged)
        else:
            always[token_id] = token
    bos = processor.bos_id()
    return SentencePieceTokenizer(
        processor,
        files.info(
            pieces | {token.text: token_id for token_id, token in (*special.items(), *always.items())},
            (bos,) if bos >= 0 else (),
            (),
        ),
        special=special.values(),
        always_special=always.values(),
        space_prefix="never" if not adds_space else "text_start" if files.flag("legacy") is False else "every_piece",
    )


def _read(folder: Path, name: str, *, max_bytes: int, cut: bool = False) -> bytes:
    """The file's bytes; a longer file is refused, or with `cut` read to there. Links out of the folder are refused."""
    try:
        file = open_in_folder(folder, name)
        if file.size > max_bytes and not cut:
            raise TokenizerError(f"{file.path} has {file.size} bytes; at most {max_bytes} are accepted")
        return file.read(0, min(file.size, max_bytes)).tobytes()
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error


def _read_template(folder: Path, name: str) -> str:
    content = _read(folder, name, max_bytes=4 * (MAX_TEMPLATE_CHARS + 1), cut=True)  # UTF-8: 4 bytes a character
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors="replace").read(MAX_TEMPLATE_CHARS + 1)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file; empty where there is no such file."""
    if not exists_in_folder(folder, name):
        return {}
    path = folder / name
    try:
        content = json.loads(_read(folder, name, max_bytes=MAX_JSON_BYTES))
    except TokenizerError:
        raise
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    for key, value in content.items():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            near = error.object[max(0, error.start - 20) : error.end + 20]
            raise TokenizerError(f"{path} {shown(key)} holds half of a surrogate pair: {shown(near)}") from error
        except RecursionError as error:
            raise TokenizerError(f"{path} {shown(key)} is nested too deep") from error
    return content


def _token_text(source: str, value: Any) -> str | None:
    """The text of a token given as a string or as an object with `content`; `source` names it in messages."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{source} must be a string or an object with content, got {shown(value)}")
    return value


def _added_token(source: str, text: object, token_id: object, **flags: bool) -> SpecialToken:
    is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < 2**31
    if not isinstance(text, str) or not text or not is_id:
        raise TokenizerError(f"{source} must give texts and ids of tokens, got {shown(text)} and {shown(token_id)}")
    assert isinstance(token_id, int)  # is_id
    return SpecialToken(token_id=token_id, text=text, **flags)
