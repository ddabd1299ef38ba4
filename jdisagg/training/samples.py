"""Completions by the plainest loop there is: a full forward for every token. To look at, not to serve."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes on from prompts of up to `room` tokens, completion included; compiled once."""

    network: Network
    leaves: Leaves
    tokenizer: Tokenizer
    room: int
    next_token: Callable[[Leaves, Array, int, float, Array], Array]

    def complete(self, prompt: str, new_tokens: int, temperature: float, seed: int) -> str:
        """What the model writes behind `prompt`, up to its end; temperature 0 takes the likeliest token each time."""
        ids = self.tokenizer.encode(prompt).ids
        ends = {self.tokenizer.token_to_id(END_OF_TEXT), self.tokenizer.token_to_id(CHAT_END)}
        buffer = jnp.zeros((1, self.room), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
        written: list[int] = []
        for position in range(len(ids), min(self.room, len(ids) + new_tokens)):
            token = int(self.next_token(self.leaves, buffer, position - 1, temperature, jax.random.key(seed)))
            if token in ends:
                break
            written.append(token)
            buffer = buffer.at[0, position].set(token)
        return self.tokenizer.decode(written, skip_special_tokens=False)


def new_writer(network: Network, leaves: Leaves, tokenizer: Tokenizer, room: int) -> Writer:
    @jax.jit
    def next_token(leaves: Leaves, buffer: Array, last: int, temperature: float, key: Array) -> Array:
        logits = forward(network.merge(leaves), buffer)[0, last]
        drawn = jax.random.categorical(jax.random.fold_in(key, last), logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature == 0, jnp.argmax(logits), drawn)

    return Writer(network, leaves, tokenizer, room, next_token)


def sample_page(writer: Writer) -> str:
    """Every prompt completed greedily and at temperature 0.6, as text to read."""
    parts = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.6):
            text = writer.complete(prompt, writer.room, temperature, seed=0)
            parts.append(f"----- temperature {temperature} -----\n{prompt}{text}\n")
    return "\n".join(parts)
