"""Text to tokens and back, as the checkpoint's own tokenizer says; chat messages to text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jdisagg.core.errors import RequestError, TooLong
from jdisagg.model.chat_template import ChatTemplates, Message
from jdisagg.model.content import SpecialText, most_bytes_a_token, without_special
from jdisagg.model.detokenizer import Vocabulary, pieces
from jdisagg.model.tokenizer_files import read_tokenizer


class Tokenizer:
    """The tokenizer of a Hugging Face folder, or the one in a GGUF file."""

    def __init__(self, place: str | Path):
        self.place = Path(place)
        found = read_tokenizer(self.place)
        raw, named = found.raw, found.named
        self._raw, self.vocabulary = raw, Vocabulary(raw)
        self.bos_id = raw.token_to_id(named["bos_token"]) if "bos_token" in named else None
        own = raw.token_to_id(named["eos_token"]) if "eos_token" in named else None
        ends: list[int] = [*found.end_ids, *([] if own is None else [own])]
        self.eos_ids = tuple(dict.fromkeys(ends))
        self._chat = ChatTemplates(found.templates, named, str(self.place))
        self.special_text, self._bytes_a_token = SpecialText(raw), most_bytes_a_token(raw)
        self._plain = without_special(raw) if self._chat.exists else raw

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, added ones included (a model's table may be longer)."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    @property
    def as_json(self) -> str:
        """As a tokenizer.json, wherever it came from."""
        return self._raw.to_str()

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

    def holds(self, text: str) -> bool:
        """Whether it is a token of its own, or the chat template speaks of it."""
        return self._raw.token_to_id(text) is not None or self._chat.speaks_of(text)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows a model which tools there are."""
        return self._chat.speaks_of("tools")

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
