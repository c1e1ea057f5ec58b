"""Tokenizers from model folders. The `tokenizers` and `sentencepiece` libraries themselves say what is right."""

from __future__ import annotations

import io
import json
import os
import random
import re

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from serving.text.tokenizer import TokenizerError, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Hello world, hello there; naïve café résumé 12345 日本語 😀",
    "def f(x):\n    return x + 1\n\n<div>text</div>",
] * 20
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "",
    "hello",
    " hello  world ",
    "naïve 😀 日本",
    "a<s>b</s> c",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<tool>y <tool> z",
    "12345\n\n\t",
]


def write(folder, library, **config):
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(folder)


def byte_level_library():
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return library


def sentencepiece_library(**metaspace):
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace(split=False, **metaspace)
    else:  # as Llama 2 converts without `legacy: false`
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False)
    library.train_from_iterator([text.replace("日", "") for text in CORPUS], trainer)
    # The trainer made the byte pieces added tokens; as in real files they belong to the vocabulary alone.
    content = json.loads(library.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def fresh(library):
    return tokenizers.Tokenizer.from_str(library.to_str())


def test_byte_level_ids_equal_the_library(tmp_path):
    library = byte_level_library()
    tokenizer = write(tmp_path, library, bos_token="<s>", eos_token={"content": "</s>"})
    oracle = fresh(library)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special_text=True)
        assert ids == oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids, skip_special_tokens=False) == text
        plain = tokenizer.encode(text, add_special_tokens=True)
        assert not tokenizer.special_token_ids & set(plain)  # the file has no post-processor
        assert tokenizer.decode(plain) == text
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.vocab_size == oracle.get_vocab_size(with_added_tokens=True)


@pytest.mark.parametrize(
    "metaspace", [{}, {"prepend_scheme": "first"}, {"prepend_scheme": "always"}, {"prepend_scheme": "never"}]
)
def test_sentencepiece_spelled_ids_equal_the_library(tmp_path, metaspace):
    library = sentencepiece_library(**metaspace)
    tokenizer = write(tmp_path, library, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    oracle = fresh(library)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special_text=True)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
    if metaspace.get("prepend_scheme") != "never":  # else the decoder would take a space that was not added
        ids = tokenizer.encode("hello 😀", add_special_tokens=False)
        assert tokenizer.decode(ids) == "hello 😀"
        assert tokenizer.decode(ids, continuation=True) == " hello 😀"


def test_post_processor_and_config_say_what_is_added(tmp_path):
    library = byte_level_library()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    hello = library.encode("hello", add_special_tokens=False).ids
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    for config, prefix, suffix in (
        ({}, [0], [1]),
        ({"add_bos_token": False}, [], [1]),
        ({"add_eos_token": False}, [0], []),
        ({"add_bos_token": True, "add_eos_token": True, "bos_token": "<|im_start|>"}, [2], [1]),
    ):
        tokenizer = write(tmp_path, library, **{**names, **config})
        assert tokenizer.encode("hello", add_special_tokens=True) == [*prefix, *hello, *suffix]
        assert tokenizer.encode("hello", add_special_tokens=False) == hello


def test_truncation_and_padding_of_the_training_run_are_off(tmp_path):
    library = byte_level_library()
    library.enable_truncation(max_length=3)
    library.enable_padding(length=64)
    tokenizer = write(tmp_path, library)
    text = "The quick brown fox jumps"
    for add_special_tokens in (False, True):  # the file has no post-processor: nothing stands before or after
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_config_makes_tokens_special_and_adds_new_ones(tmp_path):
    library = byte_level_library()
    tool = library.token_to_id("<tool>")
    decoder = {
        str(tool): {"content": "<tool>", "special": True},
        str(tool + 1): {"content": "<|new|>", "special": False, "rstrip": True},
        str(tool + 2): {"content": "<plain>"},
    }
    tokenizer = write(tmp_path, library, added_tokens_decoder=decoder)
    assert {tool, tool + 1} <= set(tokenizer.special_token_texts.values())  # flagged, and by its look
    assert tokenizer.special_token_ids == {0, 1, 2, 3, tool}  # a marker that is not flagged belongs to the text
    text = "<tool> <|new|> <plain>"
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special_text=True)
    assert [token_id for token_id in ids if token_id >= tool] == [tool, tool + 1, tool + 2]
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert [token_id for token_id in plain if token_id >= tool] == [tool + 2]
    assert tokenizer.decode(plain) == text
    assert tokenizer.vocab_size == tool + 3


def test_chat_templates_come_from_files_before_the_config(tmp_path):
    library = byte_level_library()
    assert write(tmp_path, library).chat_template is None
    assert write(tmp_path, library, chat_template="config").chat_template == "config"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = write(tmp_path, library, chat_template=named)
    assert (tokenizer.chat_template, tokenizer.named_chat_templates) == ("d", {"tool_use": "t"})
    (tmp_path / "chat_template.jinja").write_text("file\n")
    assert write(tmp_path, library, chat_template="config").chat_template == "file\n"


def train_sentencepiece(**options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
        **{
            "remove_extra_whitespaces": False,
            "normalization_rule_name": "identity",
            "user_defined_symbols": ["<tool>"],
            **options,
        },
    )
    return model.getvalue()


def test_sentencepiece_file_ids_equal_sentencepiece(tmp_path):
    proto = train_sentencepiece()
    oracle = sentencepiece.SentencePieceProcessor(model_proto=proto)
    (tmp_path / "tokenizer.model").write_bytes(proto)
    tokenizer = load_tokenizer(tmp_path)  # nothing beside it: BOS as the model has it
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    texts = [text for text in TEXTS if text] + [
        "".join(generator.choices("aehlo Téé日😀\n<>", k=30)) for _ in range(50)
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == [1, *oracle.encode(text)], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("", add_special_tokens=True) == [1]
    assert tokenizer.encode("<s>", add_special_tokens=False, allow_special_text=True) == [1]
    assert tokenizer.token_bytes(oracle.piece_to_id("<0xF0>")) == b"\xf0"


def test_sentencepiece_file_with_added_tokens_and_config(tmp_path):
    proto = train_sentencepiece()
    oracle = sentencepiece.SentencePieceProcessor(model_proto=proto)
    size = oracle.get_piece_size()
    (tmp_path / "tokenizer.model").write_bytes(proto)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": size, "<extra>": size + 1}))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eos_token_ids == (2,)
    hello = oracle.encode("hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == [*hello, 2]
    text = "hello<|user|>hello<extra>"
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special_text=True)
    assert ids[: len(hello) + 1] == [*hello, size]
    assert ids[-1] == size + 1
    assert oracle.id_to_piece(ids[len(hello) + 1]).startswith("h")  # without `legacy` a space only before the text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert size not in tokenizer.encode(text, add_special_tokens=False)


def test_folder_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(str(tmp_path)) is None


def break_json(folder):
    (folder / "tokenizer.json").write_text("{")


def break_model(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x03abc")


def only_vocab_json(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")


def collapse_spaces(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(remove_extra_whitespaces=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_json, "tokenizer.json: not a tokenizer that can be used"),
        (break_model, "tokenizer.model: not a SentencePiece model that can be used"),
        (only_vocab_json, "holds vocab.json, but neither tokenizer.json nor tokenizer.model"),
        (collapse_spaces, "remove_extra_whitespaces is not supported"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, change, message):
    write(tmp_path, byte_level_library())
    change(tmp_path)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "tokenizer_config.json must hold a JSON object"),
        ({"bos_token": 3}, "bos_token must be a string"),
        ({"bos_token": "\ud800"}, r"tokenizer_config.json 'bos_token' holds half of a surrogate pair: .*\\ud800"),
        ({"chat_template": "a\udfff"}, r"tokenizer_config.json 'chat_template' holds half of a surrogate pair"),
        (
            {"added_tokens_decoder": {"1": {"content": "\ud800"}}},
            r"tokenizer_config.json 'added_tokens_decoder' holds half of a surrogate pair: .*\\ud800",
        ),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, r"added_tokens_decoder must give .* '9+\.\.\.9+'$"),
        *(
            ({key: value}, f"tokenizer_config.json {key} must be a list or an object of tokens, got {value!r}")
            for key in ("additional_special_tokens", "extra_special_tokens")
            for value in (5, True, 1.5, "ab", 0, "")
        ),
        (
            {"extra_special_tokens": {"image": 5}},
            "tokenizer_config.json extra_special_tokens must be a string .* got 5",
        ),
        ({"eos_token": "<missing>"}, "eos_token='<missing>' is not in the vocabulary"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ({"add_bos_token": True}, "add_bos_token is true, but there is no such token"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder must give texts and ids"),
        ({"added_tokens_decoder": {"7": {"content": "<|far|>"}}}, r"gives '<\|far\|>' the id \d+, and the files .* 7"),
        ({"chat_template": 3}, "chat_template must be a string or a list"),
        ({"chat_template": [{"name": "x"}]}, "chat_template must hold objects with name and template"),
    ],
)
def test_wrong_config_values_are_refused_by_name(tmp_path, config, message):
    byte_level_library().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_special_tokens_map_is_named_where_it_is_wrong(tmp_path):
    write(tmp_path, byte_level_library())
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": "ab"}')
    with pytest.raises(
        TokenizerError, match=r"^special_tokens_map.json additional_special_tokens must be a list .* 'ab'"
    ):
        load_tokenizer(tmp_path)


SIDE_FILES = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/x.jinja",
]


def outside(path):
    (path.parents[1] / "secret").write_text("{}")
    path.symlink_to(path.parents[1] / "secret")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", *SIDE_FILES])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "cannot be opened: No such file"),
        (lambda path: path.symlink_to(path), "cannot be opened: Symlink loop"),
        (outside, "is a link that leads outside the model's folder"),
    ],
    ids=["fifo", "folder", "broken_link", "link_loop", "link_outside"],
)
def test_what_is_no_file_of_the_folder_is_refused_by_name(tmp_path, name, make, message):
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    if name in SIDE_FILES:
        byte_level_library().save(str(folder / "tokenizer.json"))
    make(folder / name)
    with pytest.raises(TokenizerError, match=f"{re.escape(str(folder / name))}: {message}"):
        load_tokenizer(folder)


def test_a_folder_of_templates_that_is_a_link_is_refused_by_name(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level_library().save(str(folder / "tokenizer.json"))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "x.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "secret")
    with pytest.raises(TokenizerError, match="additional_chat_templates: is not a folder of its own"):
        load_tokenizer(folder)


def test_links_inside_the_folder_are_followed(tmp_path):
    byte_level_library().save(str(tmp_path / "blob"))
    (tmp_path / "tokenizer.json").symlink_to("blob")
    (tmp_path / "template").write_bytes("ü\r\n".encode() + b"\xff")
    (tmp_path / "chat_template.jinja").symlink_to("template")
    assert load_tokenizer(tmp_path).chat_template == "ü\n\ufffd"


def test_text_that_a_broken_vocabulary_cannot_encode_is_an_error_of_its_own(tmp_path):
    library = sentencepiece_library(prepend_scheme="never")
    content = json.loads(library.to_str())
    content["model"] |= {"unk_token": "<gone>", "byte_fallback": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"
    with pytest.raises(TokenizerError, match=r"text that this vocabulary cannot encode: .*<gone>"):
        tokenizer.encode("Ω", add_special_tokens=False)


def test_decoders_whose_tokens_have_no_bytes_of_their_own_are_refused(tmp_path):
    library = byte_level_library()
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"decoder \['WordPiece'\] is not supported"):
        load_tokenizer(tmp_path)
