"""Text to tokens and back, as the checkpoint's own `tokenizer.json` says; chat messages to text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jdisagg.core.errors import CheckpointError, RequestError, TooLong
from jdisagg.model.chat_template import ChatTemplates, Message, find_templates
from jdisagg.model.content import SpecialText, most_bytes_a_token, without_special
from jdisagg.model.detokenizer import Vocabulary, pieces
from jdisagg.model.files import Fields, Json, first_line, read_json, shown
from jdisagg.model.hf_config import read_generation_config

TOKENIZER_BYTES = 512 << 20  # of a tokenizer.json; the largest public ones have some 35 MB


class Tokenizer:
    """The tokenizer of a Hugging Face folder (`tokenizer.json`; the other files are optional)."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        raw = _read_tokenizer(self.folder / "tokenizer.json")
        config = self._optional("tokenizer_config.json")
        named = _special_tokens(self._optional("special_tokens_map.json")) | _special_tokens(config)
        self._raw, self.vocabulary = raw, Vocabulary(raw)
        self.bos_id = raw.token_to_id(named["bos_token"]) if "bos_token" in named else None
        self.eos_ids = self._end_tokens(named.get("eos_token"))
        self._chat = ChatTemplates(find_templates(self.folder, config), named, str(self.folder))
        self.special_text, self._bytes_a_token = SpecialText(raw), most_bytes_a_token(raw)
        self._plain = without_special(raw) if self._chat.exists else raw

    def _optional(self, name: str) -> Json:
        return read_json(self.folder / name) if (self.folder / name).exists() else {}

    def _end_tokens(self, eos_token: str | None) -> tuple[int, ...]:
        """Every id that ends an answer: the generation config's and the tokenizer's own, in that order."""
        listed = read_generation_config(self.folder).eos_ids if (self.folder / "config.json").exists() else ()
        own = None if eos_token is None else self._raw.token_to_id(eos_token)
        return tuple(dict.fromkeys([*listed, *([] if own is None else [own])]))

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, added ones included (a model's table may be longer)."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, between the special tokens the model expects around a prompt if asked."""
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each; other threads run meanwhile, which they could not during `tokenizers`' own `encode`."""
        return _ids(self._raw, texts, add_special_tokens)

    def encode_chat(self, text: str, mark: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of what `chat` gave for messages that `special_text` had marked: clients' text stays text."""
        parts = self.special_text.parts(text, mark)
        around = _ids(self._raw, [""], add_special_tokens)[0]
        ids = _ids(self._raw, [text], add_special_tokens)[0] if mark not in text else []
        set_here = sum(part.token is not None for part in parts) + len(around)
        if ids and sum(token in self.vocabulary.special for token in ids) <= set_here:
            return ids
        texts = _ids(self._plain, [part.text for part in parts], False)
        inner = [
            i for part, ids in zip(parts, texts, strict=True) for i in (ids if part.token is None else [part.token])
        ]
        ends = tuple(self.eos_ids)
        before = [token for token in around if token not in ends]
        return [*before, *inner, *around[len(before) :]]

    def check_size(self, texts: Sequence[str], max_tokens: int) -> None:
        """Raises TooLong where a text has so many bytes that `max_tokens` tokens cannot hold it: nothing is read."""
        if self._bytes_a_token is None:
            return
        most = max_tokens * self._bytes_a_token
        for text in texts:
            size = len(text) if len(text) > most else len(text.encode(errors="replace"))
            if size > most:
                raise TooLong(
                    f"the prompt has {size} bytes or more, over the {most} that {max_tokens} tokens can hold"
                    f" ({self._bytes_a_token} bytes a token at the most)",
                    param="prompt",
                )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids the vocabulary does not have give nothing, broken characters give U+FFFD."""
        try:
            return self._raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError as error:
            raise RequestError(f"token ids are integers from 0 to 4294967295: {error}", "tokens") from error

    def token_text(self, token_id: int) -> str:
        """One token on its own, special ones by name: for logprobs and for looking at things."""
        return self._raw.decode([token_id], skip_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        return self._chat.exists

    def chat(self, messages: Sequence[Message], /, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Messages as one prompt by the model's template, which gets `kwargs` too (`tools`, ...).

        The template writes the special tokens itself: encode the result with `add_special_tokens=False`, and that of
        messages that are not your own with `encode_chat`.
        """
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


class Detokenizer:
    """One answer's text, streamed: the pieces joined are `Tokenizer.decode` of all ids, whatever their grouping."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._pieces = pieces(tokenizer.vocabulary, skip_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; "" while a character is open. Linear in the tokens, over a whole answer."""
        return self._pieces.push(list(ids))

    def flush(self) -> str:
        """What is still held when the answer ends (an unfinished character becomes U+FFFD)."""
        return self._pieces.flush()


def _ids(raw: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    try:
        found = raw.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError(f"text that is not Unicode cannot be tokenized: {error}", "prompt") from error
    return [each.ids for each in found]


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise CheckpointError(f"no {path.name} in {path.parent}")
    _refuse_broken_merges(path)
    try:
        raw = tokenizers.Tokenizer.from_file(str(path))
        raw.no_truncation()
        raw.no_padding()
        raw.encode_batch_fast(["a"])  # what only use finds out
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the Rust side raises bare Exception, and where it panics a BaseException
        raise CheckpointError(f"cannot read {path}: {first_line(error)}") from error
    return raw


def _refuse_broken_merges(path: Path) -> None:
    """A prefix that merged tokens do not have makes `tokenizers` 0.23 read beyond a string and end the process."""
    model = Fields(read_json(path, TOKENIZER_BYTES), str(path)).part("model")
    prefix = model.word("continuing_subword_prefix") if model is not None else None
    if model is None or not prefix:
        return
    merges = model.raw.get("merges")
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and str(parts[-1:][0] if parts else "").startswith(prefix)):
            raise model.wrong("continuing_subword_prefix", f"what all second parts begin with; {shown(merge)} does not")


def _special_tokens(config: Json) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, each written as a string or as {"content": ...}."""
    named = {key: value for key, value in config.items() if key.endswith("_token") and value}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}
