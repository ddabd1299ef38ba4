"""How well a model predicts held-out files: bits for each byte of text, whatever the tokenizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tokenizers import Tokenizer

from jdisagg.training.corpus import Document
from jdisagg.training.step import Leaves, Network, token_losses
from jdisagg.training.tokenizer import END_OF_TEXT, SPECIALS

Meter = Callable[[Leaves, np.ndarray, np.ndarray], Array]


@dataclass(frozen=True, slots=True)
class Windows:
    """Held-out text cut at document boundaries and every `length` tokens; each token is a target exactly once."""

    tokens: np.ndarray  # i32[N, length + 1], the tail padded with <|endoftext|>
    counted: np.ndarray  # bool[N, length], False where padded
    text_bytes: int  # bytes of all counted targets


def cut_windows(documents: tuple[Document, ...], tokenizer: Tokenizer, length: int) -> Windows:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    sizes = token_bytes(tokenizer)
    rows, counts, text_bytes = [], [], 0
    for document in documents:
        ids = [end_of_text, *tokenizer.encode(document.text).ids]
        text_bytes += int(sizes[ids].sum())
        for start in range(0, len(ids) - 1, length):
            row = ids[start : start + length + 1]
            counts.append(len(row) - 1)
            rows.append(row + [end_of_text] * (length + 1 - len(row)))
    return Windows(np.asarray(rows, np.int32), np.arange(length) < np.asarray(counts)[:, None], text_bytes)


def thinned(windows: Windows, count: int, tokenizer: Tokenizer) -> Windows:
    """About `count` windows spread evenly over all of them."""
    kept = np.unique(np.linspace(0, len(windows.tokens) - 1, count).astype(int))
    tokens, counted = windows.tokens[kept], windows.counted[kept]
    sizes = token_bytes(tokenizer)
    return Windows(tokens, counted, int((sizes[tokens[:, 1:]] * counted).sum()))


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """i64[V]: bytes of text each token stands for; byte-level BPE spells a byte as one character, specials are none."""
    texts = [tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size())]
    return np.asarray([0 if text in SPECIALS else len(text) for text in texts])


def make_meter(network: Network) -> Meter:
    """(leaves, i32[B, T + 1], bool[B, T]) -> f32[], the nats of all counted targets; make it once, it compiles."""

    def nats(leaves: Leaves, tokens: Array, counted: Array) -> Array:
        return (token_losses(network.merge(leaves), tokens) * counted.astype(jnp.float32)).sum()

    return jax.jit(nats)


def bits_per_byte(meter: Meter, leaves: Leaves, windows: Windows, batch: int) -> float:
    """How many bits each byte of the windows costs the model; `batch` windows are measured at a time."""
    total = 0.0
    for start in range(0, len(windows.tokens), batch):
        rows = slice(start, start + batch)
        tokens, counted = _padded(windows.tokens[rows], batch), _padded(windows.counted[rows], batch)
        total += float(meter(leaves, tokens, counted))
    return total / math.log(2) / windows.text_bytes


def _padded(rows: np.ndarray, batch: int) -> np.ndarray:
    """The rows with zero rows behind them, so that the last batch has the shape of the others."""
    return np.concatenate([rows, np.zeros((batch - len(rows), *rows.shape[1:]), rows.dtype)])
