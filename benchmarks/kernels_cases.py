"""What is measured: operations, shapes and targets. Plain tables; nothing here runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

WIRES = ("raw", "int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads x {self.size}"


LLAMA_8B = Heads(32, 8, 128)
LAPTOP = Heads(8, 4, 64)  # as in the embedded and the small benchmark models


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape. `target` is the share of its floor's speed that it is to reach."""

    operation: str  # paged_attention, prefill_attention, write_kv_pages, pack_kv_pages, unpack_kv_pages
    name: str
    heads: Heads
    page_size: int = 32
    held: tuple[int, ...] = ()  # KV tokens of each sequence
    rows: tuple[int, ...] = ()  # prefill: query rows of each sequence, the last of those held
    padding: int = 0  # prefill: rows that belong to nobody
    tokens: int = 0  # write: rows; pack and unpack: tokens of all their pages
    layers: int = 1  # pack and unpack: of the group
    wire: str = "raw"
    target: float | None = None
    headline: bool = False  # stands in docs/measurements.md
    with_peers: bool = True

    @property
    def shape(self) -> str:
        """For people."""
        wire = f", {self.wire}" if self.operation in ("pack_kv_pages", "unpack_kv_pages") else ""
        return f"{self.name}{wire}, {self.heads}"


def decode(batch: int, tokens: int, heads: Heads, **rest: object) -> Case:
    """`batch` slots of `tokens` each."""
    return replace(Case("paged_attention", f"{batch} slots x {tokens:,} tokens", heads, held=(tokens,) * batch), **rest)


def prefill(name: str, packed: list[tuple[int, int]], heads: Heads, **rest: object) -> Case:
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
    return cases
