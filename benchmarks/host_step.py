"""What the host's Python takes of a steady decode step, by part: a whole stack whose programs do nothing.

Every slot runs, nothing arrives or ends. Worker, driver, runner and jax's own dispatch are the real ones; layers are
there as leaves and pools, each an argument of every program, written out as on CPUs and GPUs or stacked as on TPUs;
programs hand the pools back and make logits of zeros. Told are microseconds of processor time (of threads, so that a
busy machine does not count) by step and stage; what grows with the requests and not with the step (their tokens told
and made text) stands apart. Medians of the rounds.

    python -m benchmarks.host_step --output=benchmarks/results/host_step_cpu.json
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import flags
from jax import Array
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from jdisagg import LLM, SamplingParams
from jdisagg.core.events import ROUTER, StepDone
from jdisagg.engine.decode import PendingRows
from jdisagg.engine.layer_group import LayerGroupPrograms
from jdisagg.engine.mesh_executor import MeshExecutor
from jdisagg.engine.multi_step import (
    DispatchResult,
    DispatchSlots,
    MultiStepPrograms,
    PendingMultiStep,
    PendingPipelinedMultiStep,
)
from jdisagg.model import looped_params
from jdisagg.parallel.submesh import Program
from jdisagg.policy.worker.decode import DecodePhase
from jdisagg.policy.worker.worker import Worker
from jdisagg.serve.deploy import memory
from jdisagg.serve.driver.driver import LiveDriver

FLAGS = flags.FlagValues()
flags.DEFINE_list("slots", ["8", "64", "256"], "of the decode worker, all taken", flag_values=FLAGS)
flags.DEFINE_list("stages", ["2", "1"], "of the decode worker, the most first", flag_values=FLAGS)
flags.DEFINE_list("turns", ["1", "8", "32"], "--multi_step", flag_values=FLAGS)
flags.DEFINE_list("forms", ["out", "stacked"], "of the layers: written out, or stacked and looped", flag_values=FLAGS)
flags.DEFINE_integer("layers", 32, "of the model, whose weights are leaves of each program", 1, flag_values=FLAGS)
flags.DEFINE_integer("steps", 200, "of each round; eight dispatches at least", 1, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "of each, after one that does not count", 1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)

PLAN, DISPATCH, JAX, READ, DRIVER = "plan", "dispatch", "jax", "read back", "driver"
TELL, ROUTE, STREAM = "tell", "route", "stream"
STEPS = "steps"
CONVERT = "convert"  # of `tell`, on the thread that reads
BY_STEP = (PLAN, DISPATCH, JAX, READ, DRIVER)
BY_TOKEN = (TELL, ROUTE, STREAM)
TIMED: tuple[tuple[type, str, str], ...] = (
    (Worker, "handle", PLAN),
    (DecodePhase, "on_step_done", TELL),
    (MeshExecutor, "run", DISPATCH),
    (Program, "__call__", JAX),
    (PendingRows, "read", READ),
    (PendingMultiStep, "read", READ),
    (PendingPipelinedMultiStep, "read", READ),
    (PendingRows, "_rows", CONVERT),
    (PendingMultiStep, "_rows", CONVERT),
    (PendingPipelinedMultiStep, "_rows", CONVERT),
)
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 288, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1 << 16, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0,
    "eos_token_id": 1, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip
PROMPT_TOKENS = 8
TOKENIZER = Path("tests/fixtures/conformance/llama3")
DISPATCHES = 8  # of a round at least
LOOPED = {"out": frozenset[tuple[str, bool]](), "stacked": frozenset({("cpu", False)})}


class Clocks:
    """Processor seconds of parts, each without the parts inside it, and how often each was entered."""

    def __init__(self) -> None:
        self.seconds = dict[str, float]()
        self.steps = 0
        self._inner = threading.local()

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **more: Any) -> Any:
            inner, self._inner.seconds = getattr(self._inner, "seconds", 0.0), 0.0
            began_s = time.thread_time()
            try:
                return function(*arguments, **more)
            finally:
                took_s = time.thread_time() - began_s
                self.seconds[part] = self.seconds.get(part, 0.0) + took_s - self._inner.seconds
                self._inner.seconds = inner + took_s

        return timed


class Actors:
    """What the driver's thread spends from one actor's event to the next, effects and all: with the router's it is by
    token, with a worker's by step."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks, self._router, self._since_s = clocks, False, 0.0

    def marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(driver: Any, actor: str, *rest: Any) -> Any:
            self._mark(router=actor == ROUTER)
            return function(driver, actor, *rest)

        return marked

    def ended(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def ended(driver: Any) -> Any:
            more = function(driver)
            self._mark(router=False)
            return more

        return ended

    def _mark(self, *, router: bool) -> None:
        now_s, seconds = time.thread_time(), self._clocks.seconds
        if self._router:
            seconds[ROUTE] = seconds.get(ROUTE, 0.0) + now_s - self._since_s
        self._router, self._since_s = router, now_s


@contextmanager
def null_programs() -> Iterator[None]:
    """Layers that do nothing, called with all that real ones are called with."""

    def decode(self: Any, leaves: Any, pools: Any, table: Array, state: Array, x: Array | None) -> tuple[Any, ...]:
        return pools, _made(self, state.shape[1])

    def prefill(self: Any, leaves: Any, pools: Any, rows: Array, *rest: Any) -> tuple[Any, ...]:
        return pools, jnp.zeros((rows.shape[1], self.config.hidden_size), jnp.float32)

    def mixed(self: Any, leaves: Any, pools: Any, table: Array, state: Array, rows: Array, *rest: Any) -> Any:
        both = jnp.zeros((state.shape[1] + rows.shape[1], self.config.hidden_size), jnp.float32)
        if not self.is_last:
            return pools, both
        return pools, _made(self, state.shape[1]), _made(self, rest[0].shape[1] - 1), both[state.shape[1] :]

    def turns(self: Any, kind: str, leaves: Any, pools: Any, slots: DispatchSlots) -> tuple[Any, ...]:
        drawn = jnp.arange(self.most)[:, None] < jnp.minimum(slots.left, slots.turns)[None, :]
        return pools, DispatchResult(drawn.astype(jnp.int32) - 1, None, None, slots.state)

    def draw(logits: Array, state: Array, metadata: Any) -> tuple[Array, Array]:
        return state, jnp.zeros(state.shape[1], jnp.int32)

    with ExitStack() as stack:
        for name, function in {"decode_step": decode, "_prefill": prefill, "_mixed": mixed}.items():
            stack.enter_context(mock.patch.object(LayerGroupPrograms, name, function))
        stack.enter_context(mock.patch.object(MultiStepPrograms, "_turns", turns))
        stack.enter_context(mock.patch("jdisagg.engine.decode.draw_greedy", draw))
        stack.enter_context(mock.patch.object(jax, "jit", partial(jax.jit, keep_unused=True)))  # weights are arguments
        stack.enter_context(mock.patch("jdisagg.policy.worker.slots.MOST_GAP_S", 10.0))  # the machine may be busy
        yield


def _made(group: LayerGroupPrograms, rows: int) -> Array:
    width = group.config.vocab_size if group.is_last else group.config.hidden_size
    return jnp.zeros((rows, width), jnp.float32)


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of processor time a step and stage, by part; those by token are of a step, all its tokens."""

    slots: int
    stages: int
    turns: int  # of a dispatch
    form: str  # of the layers
    by_step: dict[str, float]
    by_token: dict[str, float]
    rounds: list[dict[str, float]]

    @property
    def step_us(self) -> float:
        return sum(self.by_step.values())


def open_llm(folder: Path, slots: int, stages: int, turns: int, tokens: int) -> LLM:
    settings: dict[str, Any] = {
        "model": str(folder), "tokenizer": str(TOKENIZER), "load_format": "random", "prefix_caching": "off",
        "mesh": f"prefill:tp1,decode:pp{stages}" if stages > 1 else "prefill:tp1,decode:tp1", "max_num_seqs": slots,
        "max_model_len": tokens, "table_buckets": str(tokens), "max_num_batched_tokens": 128, "prefill_buckets": "128",
        "page_size": 128, "kv_tokens": (slots + 4) * tokens, "reserve_tokens": tokens, "stall_timeout_s": 1000.0,
    }  # fmt: skip
    return LLM(**settings, multi_step=turns, queue_limit=2 * slots)


async def run_all(llm: LLM, slots: int, tokens: int, told: Callable[[], bool]) -> None:
    """All slots until `told` says that it is enough."""
    asked = SamplingParams(max_tokens=tokens - PROMPT_TOKENS, temperature=0.0, ignore_eos=True)

    async def one(number: int) -> None:
        stream = llm.stream([number % 200 + 2] * PROMPT_TOKENS, asked)
        async for _ in stream:
            if told():
                break
        await stream.aclose()

    await asyncio.gather(*map(one, range(slots)))


@dataclass(slots=True)
class Threads:
    """Processor seconds of the driver's thread and of the loop that streams."""

    llm: LLM

    def seconds(self) -> dict[str, float]:
        found = {each.name: each for each in threading.enumerate()}
        return {name: cpu_s(found[thread]) for name, thread in ((DRIVER, "driver"), (STREAM, "llm"))}


def cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def steps_of(turns: int) -> int:
    """Of a round."""
    return max(FLAGS.steps, DISPATCHES * turns)


def measure(folder: Path, slots: int, stages: int, turns: int, form: str) -> Row:
    clocks = Clocks()
    tokens = -(-(PROMPT_TOKENS + 64 + (FLAGS.rounds + 2) * steps_of(turns) + 2 * slots) // 128) * 128
    with ExitStack() as stack:
        stack.enter_context(null_programs())
        stack.enter_context(mock.patch.object(looped_params, "LOOPED", LOOPED[form]))
        for kind, name, part in TIMED:
            stack.enter_context(mock.patch.object(kind, name, clocks.timed(getattr(kind, name), part)))
        actors = Actors(clocks)
        stack.enter_context(mock.patch.object(LiveDriver, "_decide", actors.marked(LiveDriver._decide)))
        stack.enter_context(mock.patch.object(LiveDriver, "_one_round", actors.ended(LiveDriver._one_round)))
        llm = stack.enter_context(open_llm(folder, slots, stages, turns, tokens))
        before = gc.get_threshold()
        memory.freeze_gc()  # as servers do
        found = _measured(llm, clocks, slots, stages, turns, tokens)
        gc.unfreeze()
        gc.set_threshold(*before)
    medians = {part: statistics.median(each[part] for each in found) for part in (*BY_STEP, *BY_TOKEN)}
    by_step, by_token = ({part: medians[part] for part in parts} for parts in (BY_STEP, BY_TOKEN))
    return Row(slots, stages, turns, form, by_step, by_token, found)


def _measured(llm: LLM, clocks: Clocks, slots: int, stages: int, turns: int, tokens: int) -> list[dict[str, float]]:
    """What each round took."""
    threads, marks, over = Threads(llm), list[dict[str, float]](), threading.Event()
    worker = next(name for name in llm.service.driver.executors.by_worker if name.startswith("decode"))
    steps = stages * steps_of(turns)  # each microbatch takes as many

    def watch(actor: str, item: Any, now_s: float) -> None:
        if actor != worker or not isinstance(item, StepDone) or len(item.decode) < slots // stages:
            return
        microbatches = len(item.decode) // (slots // stages)
        clocks.steps += microbatches * len(item.decode[0][1] or ())
        if clocks.steps >= (len(marks) + 1) * steps:
            spent = {**clocks.seconds, **{f"thread {k}": v for k, v in threads.seconds().items()}}
            marks.append({**spent, STEPS: float(clocks.steps)})
            if len(marks) > FLAGS.rounds + 1:
                over.set()

    llm.service.driver._observers = (*llm.service.driver._observers, watch)
    asyncio.run_coroutine_threadsafe(run_all(llm, slots, tokens, over.is_set), llm._loop).result()
    return [_round(before, after, stages) for before, after in pairwise(marks[1:])][: FLAGS.rounds]


def _round(before: dict[str, float], after: dict[str, float], stages: int) -> dict[str, float]:
    """Microseconds a step and stage, by part; what the driver's thread does beside the others is its own."""
    steps = after[STEPS] - before[STEPS]
    spent = {key: (after.get(key, 0.0) - before.get(key, 0.0)) * 1e6 / steps / stages for key in after}
    threads = {key: spent.pop(f"thread {key}") for key in (DRIVER, STREAM)}
    found = {part: spent.get(part, 0.0) for part in (*BY_STEP, *BY_TOKEN)}
    found[DRIVER] = threads[DRIVER] - sum(found[part] for part in (PLAN, DISPATCH, JAX, TELL, ROUTE))
    found[TELL] += spent.get(CONVERT, 0.0)
    found[STREAM] = threads[STREAM]
    return found


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="microseconds of processor time a step and stage")
    for name in ("slots", "stages", "turns", "layers", *BY_STEP, "of a step", *BY_TOKEN, "of a token"):
        shown.add_column(name, justify="right")
    for row in rows:
        by_step, by_token = (list(map("{:.1f}".format, each.values())) for each in (row.by_step, row.by_token))
        of_token = sum(row.by_token.values()) * row.stages / (row.slots / row.stages)
        sizes = map(str, (row.slots, row.stages, row.turns, row.form))
        shown.add_row(*sizes, *by_step, f"{row.step_us:.0f}", *by_token, f"{of_token:.1f}")
    return shown


def main() -> int:
    about, rows = described(), []
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": FLAGS.layers}), encoding="utf-8")
        cases = product(FLAGS.forms, map(int, FLAGS.stages), map(int, FLAGS.turns), map(int, FLAGS.slots))
        for form, stages, turns, slots in cases:
            rows.append(measure(folder, slots, stages, turns, form))
    Console(width=200).print(table(rows))
    if FLAGS.output:
        report = {**about, "layers": FLAGS.layers, "steps": FLAGS.steps, "rows": [asdict(row) for row in rows]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
