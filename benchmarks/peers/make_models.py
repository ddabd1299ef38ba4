"""Random checkpoints that every engine reads: `python -m benchmarks.peers.make_models --output=DIR`.

Llama-shaped, float32, seeded; a byte-level BPE of 8192 tokens learnt from the standard library. The same seed gives
the same weights on every machine; the tokenizer follows the running Python's library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from absl import flags
from tokenizers import Tokenizer

from benchmarks import entry
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.export import config_json, save_hf, write_json
from jdisagg.model.sources import RandomSource
from jdisagg.training.data import END_OF_TEXT, PAD, make_tokenizer, read_corpus
from jdisagg.training.run import tokenizer_config

FLAGS = flags.FlagValues()
OUTPUT = flags.DEFINE_string("output", None, "folder for the model folders", required=True, flag_values=FLAGS)
MODELS = flags.DEFINE_list("models", ["small", "base"], "which to make", flag_values=FLAGS)
SEED = flags.DEFINE_integer("seed", 1234, "of the weights", flag_values=FLAGS)

VOCAB_SIZE = 8192
OTHER_FAMILIES = (".bias", ".q_norm.weight", ".k_norm.weight")  # a Llama has none, and strict readers refuse them
SHAPES = {
    "small": ModelConfig("llama", VOCAB_SIZE, 512, 1408, 8, 8, 4, 64, max_position=4096, tie_embeddings=True),
    "base": ModelConfig("llama", VOCAB_SIZE, 768, 3072, 12, 12, 4, 64, max_position=4096),
}


def make(folder: Path, config: ModelConfig, tokenizer: Tokenizer, seed: int) -> None:
    """Writes one Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_hf(folder, tensors(config, seed))
    ends = {"bos_token_id": tokenizer.token_to_id(END_OF_TEXT), "eos_token_id": tokenizer.token_to_id(END_OF_TEXT)}
    pad = tokenizer.token_to_id(PAD)
    write_json(folder / "config.json", config_json(config, "float32", **ends, pad_token_id=pad))
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer_config.json", tokenizer_config(config, tokenizer))
    tokenizer.save(str(folder / "tokenizer.json"))


def tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a plain Llama whole, f32[out, in], under its Hugging Face name."""
    source = RandomSource(config, seed)
    for name in source.names:
        if name.endswith(OTHER_FAMILIES):
            continue
        shape = source.shape(name)
        assert shape is not None
        yield name, np.ascontiguousarray(source.read(name, tuple(slice(0, size) for size in shape)))


def main() -> int:
    unknown = [name for name in MODELS.value if name not in SHAPES]
    if unknown:
        raise ValueError(f"--models has {unknown[0]!r}, must be of {', '.join(SHAPES)}")
    tokenizer = make_tokenizer((document.text for document in read_corpus().training), VOCAB_SIZE)
    for name in MODELS.value:
        make(Path(OUTPUT.value) / name, SHAPES[name], tokenizer, SEED.value)
        print(f"{Path(OUTPUT.value) / name}: {SHAPES[name].num_params() / 1e6:.1f} M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
