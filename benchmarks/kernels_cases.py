"""What is measured: operations, shapes and targets. Plain tables; nothing here runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

WIRES = ("raw", "int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads x {self.size}"


NO_HEADS = Heads(0, 0, 0)
LLAMA_8B = Heads(32, 8, 128)
DEEPSEEK_V3 = Heads(128, 1, 576)  # as its latents are read, absorbed
DEEPSEEK_V3_TP8 = Heads(16, 1, 576)
LATENT_VALUES = 512
QUANTISED = ("int8", "fp8")
LAPTOP = Heads(8, 4, 64)  # as in the embedded and the small benchmark models


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape. `target` is the share of its floor's speed that it is to reach."""

    operation: str  # an operation of pallas_kernels, or product: a layer's own, jdisagg.model.products
    name: str
    heads: Heads
    page_size: int = 32
    held: tuple[int, ...] = ()  # KV tokens of each sequence
    rows: tuple[int, ...] = ()  # prefill: query rows of each sequence, the last of those held
    padding: int = 0  # prefill: rows that belong to nobody
    tokens: int = 0  # write: rows; pack and unpack: tokens of all their pages
    layers: int = 1  # pack and unpack: of the group
    wire: str = "raw"
    pool: str = ""  # attention: what pages are quantised to
    value_size: int = 0  # attention to latents: numbers of a row that are V as well
    drafted: int = 1  # decode: rows of each slot, a token and what is guessed to follow it
    weights: str = ""  # product: what the matrix holds
    matrix: tuple[int, ...] = ()  # product: inputs, outputs; grouped_product: experts before them
    target: float | None = None
    headline: bool = False  # stands in docs/measurements.md
    with_peers: bool = True

    @property
    def shape(self) -> str:
        """For people."""
        if self.matrix:
            return f"{self.name}, {' x '.join(f'{side:,}' for side in self.matrix)}, {self.weights}"
        told = [self.name]
        told += [self.wire] if self.operation in ("pack_kv_pages", "unpack_kv_pages") else []
        told += [f"{self.drafted} rows each"] if self.drafted > 1 else []
        told += [f"{self.pool} pages"] if self.pool else []
        heads = f"{self.heads.query} heads over latents of {self.heads.size}" if self.value_size else str(self.heads)
        return ", ".join([*told, heads])

    @property
    def label(self) -> str:
        """By which a pattern picks it."""
        pages = "" if self.matrix else f", pages of {self.page_size}"
        return f"{self.operation} {self.shape}{pages}"


def decode(batch: int, tokens: int, heads: Heads, **rest: Any) -> Case:
    """`batch` slots of `tokens` each."""
    return replace(Case("paged_attention", f"{batch} slots x {tokens:,} tokens", heads, held=(tokens,) * batch), **rest)


def prefill(name: str, packed: list[tuple[int, int]], heads: Heads, **rest: Any) -> Case:
    """`packed` are (rows, tokens held) of each sequence."""
    rows, held = zip(*packed, strict=True)
    return replace(Case("prefill_attention", name, heads, rows=rows, held=held), **rest)


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, quadratic: most are short, as in service."""
    return tuple(max(1, longest * (i + 1) ** 2 // batch**2) for i in range(batch))


def decode_target(batch: int, tokens: int) -> float | None:
    if batch >= 64 and tokens >= 4096:
        return 0.85
    return 0.6 if (batch, tokens) == (1, 32768) else None


def accelerator_cases() -> list[Case]:
    """Llama-3-8B's heads: what an H100 or a TPU is held to."""
    cases = [
        decode(batch, tokens, LLAMA_8B, target=decode_target(batch, tokens),
               headline=(batch, tokens) in ((1, 32768), (8, 4096), (64, 4096), (256, 4096)))
        for batch in (1, 8, 64, 256) for tokens in (512, 4096, 32768)
    ]  # fmt: skip
    cases += [
        decode(batch, tokens, LLAMA_8B, page_size=size, target=decode_target(batch, tokens), with_peers=False)
        for size in (16, 64) for batch, tokens in ((1, 32768), (64, 4096))
    ]  # fmt: skip
    for batch, longest in ((64, 8192), (256, 4096)):
        name = f"{batch} slots x 1 to {longest:,} tokens"
        cases.append(replace(decode(1, 1, LLAMA_8B), name=name, held=ragged(batch, longest), headline=batch == 64))
    cases += [
        prefill("8 prompts of 512", [(512, 512)] * 8, LLAMA_8B),
        prefill("1 prompt of 4,096", [(4096, 4096)], LLAMA_8B, target=0.55, headline=True),
        prefill("4 prompts of 4,096", [(4096, 4096)] * 4, LLAMA_8B, target=0.55),
        prefill("1 prompt of 32,768", [(32768, 32768)], LLAMA_8B, target=0.55, headline=True),
        prefill("2,048 rows of 16,384", [(2048, 16384)], LLAMA_8B, target=0.55, headline=True),
        prefill("ragged, 64 to 4,096", [(64 * 2**i, 64 * 2**i) for i in range(7)], LLAMA_8B),
    ]
    cases += [Case("write_kv_pages", f"{tokens:,} tokens", LLAMA_8B, tokens=tokens) for tokens in (64, 8192)]
    for operation in ("pack_kv_pages", "unpack_kv_pages"):
        whole = Case(operation, "8,192 tokens x 8 layers", LLAMA_8B, tokens=8192, layers=8, target=0.8)
        cases += [replace(whole, wire=wire, headline=wire in ("raw", "int8")) for wire in WIRES]
    return cases


def latent_cases() -> list[Case]:
    """DeepSeek-V3's attention, whole and an eighth of its heads, over pages of latents."""
    latents: dict[str, Any] = {"value_size": LATENT_VALUES, "page_size": 64, "with_peers": False}
    decoded = ((8, 4096), (64, 4096), (1, 32768))
    cases = [
        decode(batch, tokens, DEEPSEEK_V3_TP8, target=decode_target(batch, tokens), headline=batch == 64, **latents)
        for batch, tokens in decoded
    ]
    cases += [decode(64, 4096, DEEPSEEK_V3, headline=True, **latents)]
    cases += [decode(64, 4096, DEEPSEEK_V3_TP8, drafted=4, target=0.85, **latents)]
    cases += [prefill("1 prompt of 4,096", [(4096, 4096)], DEEPSEEK_V3_TP8, target=0.55, headline=True, **latents)]
    return [*cases, prefill("2,048 rows of 16,384", [(2048, 16384)], DEEPSEEK_V3_TP8, target=0.55, **latents)]


def quantised_cases() -> list[Case]:
    """Attention over pages of int8 and fp8, whose bytes the floor of decode counts."""
    cases = []
    for pool in QUANTISED:
        quantised: dict[str, Any] = {"pool": pool, "with_peers": False}
        cases += [
            decode(batch, tokens, LLAMA_8B, target=decode_target(batch, tokens), headline=batch == 64, **quantised)
            for batch, tokens in ((8, 4096), (64, 4096), (1, 32768))
        ]
        cases += [
            prefill("1 prompt of 4,096", [(4096, 4096)], LLAMA_8B, target=0.55, headline=True, **quantised),
            prefill("2,048 rows of 16,384", [(2048, 16384)], LLAMA_8B, target=0.55, **quantised),
        ]
    return cases


def draft_cases() -> list[Case]:
    """Rows of a draft: the floor reads a slot's pages once, whatever rows it has."""
    drafted: dict[str, Any] = {"with_peers": False}
    cases = [
        decode(batch, 4096, LLAMA_8B, drafted=rows, target=0.85 if batch == 64 else None,
               headline=(batch, rows) == (64, 4), **drafted)
        for batch in (8, 64) for rows in (2, 4, 8)
    ]  # fmt: skip
    return cases + [decode(64, 4096, LLAMA_8B, drafted=4, pool=pool, target=0.85, **drafted) for pool in QUANTISED]


def product_cases() -> list[Case]:
    """A layer's products: few rows against the copy of the matrix, many against a square product in bf16, of whose
    speed int8 and fp8 may have twice."""
    cases = [
        product(rows, (8192, 8192), weights, target=0.7 if rows == 64 else None, headline=rows in (64, 2048))
        for weights in ("bfloat16", *QUANTISED) for rows in (8, 64, 2048)
    ]  # fmt: skip
    return cases + [
        grouped(name, rows, matrix, target=target, headline=target is not None)
        for name, rows, matrix, target in (
            ("64 rows, Qwen3-30B-A3B", 64, (128, 2048, 768), None),
            ("1,024 rows, Qwen3-30B-A3B", 1024, (128, 2048, 768), 0.7),
            ("16,384 rows, Qwen3-30B-A3B", 16_384, (128, 2048, 768), 0.5),
            ("16 rows, Mixtral-8x7B", 16, (8, 4096, 14_336), 0.7),
            ("4,096 rows, Mixtral-8x7B", 4096, (8, 4096, 14_336), 0.5),
        )
    ]


def product(rows: int, matrix: tuple[int, int], weights: str, **rest: Any) -> Case:
    return Case("product", f"{rows:,} rows", NO_HEADS, 0, tokens=rows, matrix=matrix, weights=weights, **rest)


def grouped(name: str, rows: int, matrix: tuple[int, int, int], **rest: Any) -> Case:
    """Up and down again, by experts drawn at random."""
    return Case("grouped_product", name, NO_HEADS, 0, tokens=rows, matrix=matrix, weights="bfloat16", **rest)


def cpu_cases() -> list[Case]:
    """What a laptop runs. Decode is to take at most twice the time of copying its pages: half of the floor's speed."""
    cases = [
        decode(8, tokens, LAPTOP, page_size=size, target=0.5 if tokens == 512 else None,
               headline=size == 32 or tokens == 512)
        for size in (16, 32, 64) for tokens in (128, 512, 2048)
    ]  # fmt: skip
    uneven = replace(decode(1, 1, LAPTOP), name="8 slots x 64 to 575 tokens", held=tuple(range(64, 577, 73)))
    chunks = [
        prefill("8 prompts of 128", [(128, 128)] * 8, LAPTOP),
        prefill("8 x 128 rows of 512", [(128, 512)] * 8, LAPTOP),
        prefill("1 prompt of 1,024", [(1024, 1024)], LAPTOP, headline=True),
        prefill("256 rows of 2,048", [(256, 2048)], LAPTOP, headline=True),
        prefill("16 prompts of 32, half padding", [(32, 32)] * 16, LAPTOP, padding=512),
    ]
    rest = [Case("write_kv_pages", "512 tokens", LAPTOP, tokens=512)]
    for operation in ("pack_kv_pages", "unpack_kv_pages"):
        whole = Case(operation, "2,048 tokens x 4 layers", LAPTOP, tokens=2048, layers=4)
        rest += [replace(whole, wire=wire, headline=wire in ("raw", "int8")) for wire in WIRES]
    return [*cases, uneven, *chunks, *rest]


def tiny_cases() -> list[Case]:
    """Every operation, small enough for a test on any platform; no target, for nothing is proven by them."""
    heads = Heads(4, 2, 64)
    cases = [
        decode(2, 64, heads, page_size=16),
        replace(decode(1, 1, heads, page_size=16), name="2 slots x 5 to 40 tokens", held=(5, 40)),
        prefill("1 prompt of 128", [(128, 128)], heads, page_size=16),
        prefill("packed", [(16, 40), (3, 3)], heads, page_size=16),
        Case("write_kv_pages", "8 tokens", heads, page_size=16, tokens=8),
    ]
    for operation in ("pack_kv_pages", "unpack_kv_pages"):
        whole = Case(operation, "64 tokens x 2 layers", heads, page_size=16, tokens=64, layers=2)
        cases += [replace(whole, wire=wire) for wire in ("raw", "int8")]
    latents = Heads(4, 1, 80)
    cases += [replace(each, value_size=64, with_peers=False) for each in (
        decode(2, 64, latents, page_size=16),
        decode(2, 64, latents, page_size=16, drafted=2),
        prefill("1 prompt of 64", [(64, 64)], latents, page_size=16),
    )]  # fmt: skip
    for pool in QUANTISED:
        cases += [
            decode(2, 64, heads, pool=pool, with_peers=False),
            prefill("1 prompt of 64", [(64, 64)], heads, pool=pool, with_peers=False),
        ]
    cases += [decode(2, 64, heads, drafted=2, with_peers=False)]
    cases += [product(4, (64, 64), weights) for weights in ("bfloat16", *QUANTISED)]
    return [*cases, grouped("20 rows", 20, (4, 64, 32))]


SUITES: dict[str, Callable[[], list[Case]]] = {
    "latents": latent_cases,
    "quantised": quantised_cases,
    "drafts": draft_cases,
    "products": product_cases,
    "tiny": tiny_cases,
}  # beside the device's own
