"""Bits per byte: every byte of the held-out text is counted once, whatever the windows."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.training.data import CorpusFiles, SourceFile, make_tokenizer
from jdisagg.training.run import TrainSettings, bits_per_byte, cut_windows, make_meter, thinned, token_bytes
from jdisagg.training.step import new_network

TEXTS = (SourceFile("one.py", "x = 'é漢'\n" * 9), SourceFile("two.py", "y = 2\n"))


@pytest.mark.parametrize("length", [7, 64])
def test_windows_count_every_byte_once(corpus: CorpusFiles, length: int) -> None:
    tokenizer = make_tokenizer((document.text for document in corpus.training), 320)
    windows = cut_windows(TEXTS, tokenizer, length)
    assert windows.text_bytes == sum(len(document.text.encode()) for document in TEXTS)
    targets = windows.tokens[:, 1:][windows.counted]
    assert tokenizer.decode(targets.tolist()) == "".join(document.text for document in TEXTS)


def test_a_model_that_knows_nothing_needs_log2_of_the_vocabulary_a_token(settings: TrainSettings) -> None:
    tokenizer = make_tokenizer([document.text for document in TEXTS], settings.model.vocab_size)
    windows = cut_windows(TEXTS, tokenizer, 16)
    network = new_network(settings.model, seed=0)
    blank = [jnp.zeros_like(leaf) for leaf in network.leaves]
    wanted = windows.counted.sum() * math.log2(settings.model.vocab_size) / windows.text_bytes
    assert bits_per_byte(make_meter(network), blank, windows, batch=3) == pytest.approx(wanted, rel=1e-5)


def test_a_thinned_check_counts_the_bytes_of_its_own_windows(corpus: CorpusFiles) -> None:
    tokenizer = make_tokenizer((document.text for document in corpus.training), 320)
    windows = cut_windows(corpus.held_out, tokenizer, 16)
    check = thinned(windows, 3, tokenizer)
    text = tokenizer.decode(check.tokens[:, 1:][check.counted].tolist())
    assert len(check.tokens) == 3 and check.text_bytes == len(text.encode())
    assert thinned(windows, len(windows.tokens), tokenizer).text_bytes == windows.text_bytes


def test_special_tokens_stand_for_no_bytes(corpus: CorpusFiles) -> None:
    sizes = token_bytes(make_tokenizer((document.text for document in corpus.training), 320))
    assert np.array_equal(sizes[:4], [0, 0, 0, 0]) and sizes[4:260].tolist() == [1] * 256
