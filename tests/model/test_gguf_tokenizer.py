"""Tokenizers from GGUF files: ids as `transformers` has them, text and back, templates, ends, and refusals."""

from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from jdisagg.core.errors import CheckpointError, UnsupportedModel
from jdisagg.model.checkpoint import read_defaults, read_model
from jdisagg.model.gguf.source import PATTERNS
from jdisagg.model.tokenizer import TextDecoder, Tokenizer
from tests.fixtures.gguf_files import CONTROL, QUANTISED, TEXTS, byte_level, expected, sentencepiece


def file_of(tmp_path, words, more=lambda writer: None):
    """A small model with this vocabulary."""
    tiny = replace(QUANTISED["qwen2"], words=words)
    return tiny.write(tmp_path / "model.gguf", more=more)


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_ids_are_those_of_transformers_and_decode_to_the_text(name, tmp_path):
    tokenizer = Tokenizer(QUANTISED[name].write(tmp_path / "model.gguf"))
    assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] == expected(name).ids
    for text in TEXTS[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("words", [sentencepiece(), byte_level()], ids=["llama", "gpt2"])
def test_pieces_of_an_answer_join_to_its_text(words, tmp_path):
    tokenizer = Tokenizer(file_of(tmp_path, words))
    for text in TEXTS[:3]:
        stream, ids = TextDecoder(tokenizer), tokenizer.encode(text, add_special_tokens=False)
        assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == tokenizer.decode(ids)


def test_smollm_takes_digits_one_by_one(tmp_path):
    """As its own tokenizer.json says, which `transformers` does not heed when it reads a GGUF file."""
    words = byte_level("smollm")
    own = tokenizers.Tokenizer.from_str(Tokenizer(file_of(tmp_path, words))._raw.to_str())
    ours = own.encode_batch([*TEXTS, "1234 x99"], add_special_tokens=False)
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    own.decoder = decoders.ByteLevel()
    theirs = own.encode_batch([*TEXTS, "1234 x99"], add_special_tokens=False)
    assert [each.ids for each in ours] == [each.ids for each in theirs]


@pytest.mark.parametrize("pre", PATTERNS)
def test_every_named_cut_gives_the_text_back(pre, tmp_path):
    tokenizer = Tokenizer(file_of(tmp_path, byte_level(pre)))
    composed = {TEXTS[3]} if pre == "qwen2" else set()
    for text in (*TEXTS, "a" * 300 + " \n\n 007,x!? \t"):
        assert text in composed or tokenizer.decode(tokenizer.encode(text)) == text


def test_a_prompt_begins_as_the_file_says(tmp_path):
    bos = {True: [0], False: []}
    for words, default in ((byte_level("qwen2"), False), (byte_level("llama-bpe"), True), (sentencepiece(), True)):
        start = bos[default] if words.kind == "gpt2" else [1] if default else []
        assert Tokenizer(file_of(tmp_path, words)).encode("")[:1] == start
    for said in (True, False):
        path = file_of(tmp_path, byte_level(), lambda writer, said=said: writer.add_add_bos_token(said))
        assert Tokenizer(path).encode("x")[:-1] == bos[said]
    path = file_of(tmp_path, byte_level(), lambda writer: writer.add_add_eos_token(True))
    assert Tokenizer(path).encode("x")[1:] == [2]


def test_without_a_space_before_the_first_word(tmp_path):
    path = file_of(tmp_path, sentencepiece(), lambda writer: writer.add_add_space_prefix(False))
    with_space = Tokenizer(file_of(tmp_path / "..", sentencepiece()))
    tokenizer = Tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("the dog")) == "the dog"
    assert tokenizer.encode("the") != with_space.encode("the") and tokenizer.encode(" the") == with_space.encode("the")


def test_a_special_token_that_a_client_wrote_stays_text(tmp_path):
    for words, text in ((sentencepiece(), "</s>"), (byte_level(), "<|im_end|>")):
        tokenizer = Tokenizer(file_of(tmp_path, words))
        end = tokenizer.encode(text, add_special_tokens=False)[-1]
        assert end == 2 and 2 not in tokenizer._plain.encode(text, add_special_tokens=False).ids


def test_template_ends_and_sampling_come_from_the_file(tmp_path):
    def more(writer):
        writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")

    path = file_of(tmp_path, byte_level(), more)
    tokenizer, defaults = Tokenizer(path), read_defaults(path)
    assert tokenizer.chat([{"role": "user", "content": "x"}]) == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.chat([], tools="T") == "T"
    assert tokenizer.eos_ids == defaults.eos_ids == (2, 3, 0) and tokenizer.bos_id == 0
    assert defaults.sampling == {"temperature": 0.5}


def changed(**changes):
    return replace(byte_level(), **changes)


def without(name, count=1):
    return {name: getattr(byte_level(), name)[:-count]}


REFUSED = [
    (changed(pre="mystery"), "tokenizer.ggml.pre = 'mystery' is not supported; supported: default, llama3"),
    (changed(kind="bert"), "tokenizer 'bert' is not supported; supported: gpt2, llama"),
    (changed(merges=["a b c"]), "merge 'a b c' is not two tokens"),
    (changed(merges=["zz qq"]), "its tokenizer cannot be built: "),
    (changed(merges=None), "tokenizer.ggml.merges = None; needed: an array of str"),
    (changed(types=[CONTROL]), "tokenizer.ggml.token_type has 1 entries for 288 tokens"),
    (changed(ends={"eos": 288}), "tokenizer.ggml.eos_token_id = 288; needed: a token id from 0 to 287"),
    (changed(tokens=["x" * 2000, *byte_level().tokens[1:]]), "has a token of 2000 characters; at most 1024"),
    (replace(sentencepiece(), scores=None), "tokenizer.ggml.scores = None; needed: an array of float"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_vocabulary_that_cannot_be_is_refused_in_one_line(words, says, tmp_path):
    path = file_of(tmp_path, words)
    with pytest.raises(CheckpointError) as refused:
        Tokenizer(path)
    assert says in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path):
    tiny = QUANTISED["qwen2"]
    words = replace(tiny.words, tokens=tiny.words.tokens[:-1], types=tiny.words.types[:-1])
    path = tiny.write(tmp_path / "model.gguf", words=words)
    with pytest.raises(CheckpointError, match=r"the tokenizer has 287 tokens, token_embd.weight has 288 rows"):
        read_model(path)


def test_an_unknown_template_is_refused_where_it_is_read(tmp_path):
    path = file_of(tmp_path, byte_level(), lambda writer: writer.add_uint32("tokenizer.chat_template.x", 7))
    with pytest.raises(UnsupportedModel, match=r"tokenizer.chat_template.x = 7; needed: a text"):
        Tokenizer(path)
