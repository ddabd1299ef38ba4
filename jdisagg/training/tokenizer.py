"""The embedded model's tokenizer: byte-level BPE, its special tokens and its chat template."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jdisagg.training.corpus import Lesson

END_OF_TEXT, CHAT_START, CHAT_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (END_OF_TEXT, CHAT_START, CHAT_END, PAD)  # their ids are 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns byte-level BPE (GPT-2's pre-tokeniser) from `texts`; every byte has a token, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_chat(lesson: Lesson) -> str:
    """A lesson written as CHAT_TEMPLATE writes one question and its answer."""
    return (
        f"{CHAT_START}user\n{lesson.wish}{CHAT_END}\n"
        f"{CHAT_START}assistant\n{lesson.answer}{CHAT_END}\n"
    )  # fmt: skip
