"""Completions by the plainest loop there is: a full forward for every token. To look at, not to serve."""

import jax
import jax.numpy as jnp
from jax import Array
from tokenizers import Tokenizer

from jdisagg.model.network import forward
from jdisagg.training.step import Leaves, Network
from jdisagg.training.tokenizer import CHAT_END, CHAT_START, END_OF_TEXT

PROMPTS = (
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self",
    "import os\n\ndef ",
    f"{CHAT_START}user\nWrite the function is_prime: Return True if n is a prime number.{CHAT_END}\n"
    f"{CHAT_START}assistant\n",
)


def complete(
    network: Network, leaves: Leaves, tokenizer: Tokenizer, prompt: str, new_tokens: int, temperature: float, seed: int
) -> str:
    """What the model writes behind `prompt`, up to its end; temperature 0 takes the likeliest token each time."""
    ids = tokenizer.encode(prompt).ids
    ends = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(CHAT_END)}
    buffer = jnp.zeros((1, len(ids) + new_tokens), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
    key = jax.random.key(seed)

    @jax.jit
    def next_token(leaves: Leaves, buffer: Array, last: Array) -> Array:
        logits = forward(network.merge(leaves), buffer)[0, last]
        drawn = jax.random.categorical(jax.random.fold_in(key, last), logits / max(temperature, 1e-6))
        return jnp.argmax(logits) if temperature == 0 else drawn

    written: list[int] = []
    for position in range(len(ids), len(ids) + new_tokens):
        token = int(next_token(leaves, buffer, jnp.asarray(position - 1)))
        if token in ends:
            break
        written.append(token)
        buffer = buffer.at[0, position].set(token)
    return tokenizer.decode(written, skip_special_tokens=False)


def sample_page(network: Network, leaves: Leaves, tokenizer: Tokenizer, new_tokens: int = 120) -> str:
    """Every prompt completed greedily and at temperature 0.6, as text to read."""
    parts = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.6):
            text = complete(network, leaves, tokenizer, prompt, new_tokens, temperature, seed=0)
            parts.append(f"----- temperature {temperature} -----\n{prompt}{text}\n")
    return "\n".join(parts)
