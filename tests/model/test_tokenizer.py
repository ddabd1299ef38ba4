"""Round trips, streamed text and chat templates, against `tokenizers` itself and what `transformers` rendered."""

import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from jdisagg.core.errors import CheckpointError, RequestError
from jdisagg.model.tokenizer import TextDecoder, Tokenizer
from tests.fixtures.conformance import ROOT, families

BYTE_LEVEL = Tokenizer(ROOT / "llama3")
FAMILY_EMOJI = "👩‍👩‍👧 naïve 世界"


def sentencepiece_like(folder: Path) -> Tokenizer:
    """A vocabulary of the Llama 2 kind: words with "▁", byte tokens for the rest, a special token inside."""
    words = ["▁", "▁the", "▁a", "the", "x", "é", "\ufffd", "  ", "▁▁", "<0x", "0x41"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    raw = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece_like(tmp_path_factory.mktemp("sentencepiece"))


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool, size: int = 1) -> list[str]:
    detokenizer = TextDecoder(tokenizer, skip)
    return [*(detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)), detokenizer.flush()]


@given(st.text())
def test_text_comes_back_from_its_tokens(text: str):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@given(st.text(st.characters(exclude_characters="▁\ufffd", exclude_categories=["Cs"])))
def test_text_comes_back_through_byte_tokens(sentencepiece: Tokenizer, text: str):
    assert sentencepiece.decode(sentencepiece.encode(text, add_special_tokens=False)) == text


@given(st.lists(st.integers(0, 300)), st.booleans(), st.integers(1, 5))
@settings(max_examples=300)
def test_streamed_pieces_joined_are_the_whole_decode_of_any_byte_level_tokens(ids: list[int], skip: bool, size: int):
    assert "".join(streamed(BYTE_LEVEL, ids, skip, size)) == BYTE_LEVEL.decode(ids, skip)


@given(st.lists(st.integers(0, 275) | st.integers(258, 275) | st.just(2)), st.booleans(), st.integers(1, 5))
@settings(max_examples=500)
def test_streamed_pieces_joined_are_the_whole_decode_of_any_sentencepiece_tokens(
    sentencepiece: Tokenizer, ids: list[int], skip: bool, size: int
):
    assert "".join(streamed(sentencepiece, ids, skip, size)) == sentencepiece.decode(ids, skip)


@given(st.text(st.characters(exclude_characters="▁\ufffd", exclude_categories=["Cs"]), min_size=1))
def test_no_piece_of_valid_text_holds_half_a_character(sentencepiece: Tokenizer, text: str):
    for tokenizer in (BYTE_LEVEL, sentencepiece):
        pieces = streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False), False)
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_of_several_tokens_arrives_whole_with_its_last_one():
    ids = BYTE_LEVEL.encode("世", add_special_tokens=False)
    assert len(ids) > 1
    assert streamed(BYTE_LEVEL, ids, True) == [*[""] * (len(ids) - 1), "世", ""]


def test_an_unfinished_character_is_flushed_as_a_replacement():
    ids = BYTE_LEVEL.encode("世", add_special_tokens=False)[:-1]
    assert "".join(streamed(BYTE_LEVEL, ids, True)) == BYTE_LEVEL.decode(ids) == "\ufffd"


def test_special_tokens_are_shown_only_when_asked():
    ids = BYTE_LEVEL.encode("a")
    assert ids[0] == BYTE_LEVEL.bos_id
    assert "".join(streamed(BYTE_LEVEL, ids, True)) == "a"
    assert "".join(streamed(BYTE_LEVEL, ids, False)) == "<|bos|>a"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "one endless run of bytes"])
def test_streaming_costs_the_same_for_the_last_token_as_for_the_first(sentencepiece: Tokenizer, kind: str):
    tokenizer = BYTE_LEVEL if kind == "byte level" else sentencepiece
    ids = [3 + 0xE4] * 20_000 if kind.startswith("one") else tokenizer.encode("the x " * 4000)[:20_000]
    detokenizer, halves = TextDecoder(tokenizer), []
    for half in (ids[:10_000], ids[10_000:]):
        start = time.perf_counter()
        for token_id in half:
            detokenizer.push([token_id])
        halves.append(time.perf_counter() - start)
    assert halves[1] < 5 * halves[0] + 0.05


@pytest.mark.parametrize("family", [family for family in families() if (ROOT / family / "chat.json").exists()])
def test_chat_templates_render_as_transformers_renders_them(family: str):
    tokenizer, expected = Tokenizer(ROOT / family), json.loads((ROOT / family / "chat.json").read_text())
    assert tokenizer.chat(expected["messages"]) == expected["open"]
    assert tokenizer.chat(expected["messages"], add_generation_prompt=False) == expected["closed"]


def test_tools_reach_the_template_made_for_them_unescaped():
    tools = [{"name": "größer", "when": "a < b & 'c'"}]
    assert Tokenizer(ROOT / "mistral").chat([], tools=tools) == json.dumps(tools, ensure_ascii=False)


def test_a_template_that_refuses_a_message_makes_a_request_error():
    with pytest.raises(RequestError, match="no role pirate") as caught:
        BYTE_LEVEL.chat([{"role": "pirate", "content": "arr"}])
    assert caught.value.param == "messages"


def test_a_message_without_content_makes_a_request_error():
    with pytest.raises(RequestError):
        BYTE_LEVEL.chat([{"role": "user"}, 3])  # pyright: ignore[reportArgumentType] (what a client may send)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((ROOT / "qwen3" / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(CheckpointError, match="sandbox"):
        Tokenizer(tmp_path).chat([])


def test_a_model_without_a_template_says_so():
    tokenizer = Tokenizer(ROOT / "qwen3")
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"qwen3 has no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


def test_end_tokens_are_those_of_the_generation_config_and_the_tokenizer(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((ROOT / "llama3" / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert Tokenizer(tmp_path).eos_ids == (3, 2, 1)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer(tmp_path)


def test_text_that_is_no_unicode_is_the_clients_mistake():
    with pytest.raises(RequestError):
        BYTE_LEVEL.encode("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_an_id_that_can_be_no_token_is_the_clients_mistake(token_id: int):
    with pytest.raises(RequestError, match="token ids"):
        BYTE_LEVEL.decode([1, token_id])


def test_an_id_beyond_the_vocabulary_gives_nothing():
    assert BYTE_LEVEL.decode([69, 5000]) == BYTE_LEVEL.decode([69])
