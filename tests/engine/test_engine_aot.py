"""The engine's real programs, compiled to the end for TPUs and GPUs that are not there."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jdisagg.aot import ENVIRONMENT
from jdisagg.core.kv_layout import KVLayout
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import WorkerId
from jdisagg.core.targets import CHIPS, Target
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.audit import check, memory_of
from jdisagg.engine.outline import Outline, shipments
from jdisagg.parallel.topology import check_compiler, devices_of
from tests.engine import stacks

LLAMA_3_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, rope_theta=500_000.0)
LLAMA_3_70B = replace(LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)


def outline_like(machine):
    """The outline of a machine that exists, on its devices."""
    layers = [section.layers for section in machine.sections]
    devices = list(dict.fromkeys(device for section in machine.sections for device in section.place.devices))
    layout = machine.sections[0].kv.layout
    return Outline(machine.config, machine.model, layout, layers, devices, jnp.float32)


def twins(machine, outline):
    """(the outline's program, the machine's) of everything."""
    pairs = [(a.programs, b.programs) for a, b in zip(outline.sections, machine.sections, strict=True)]
    pairs += [(outline.draws.programs, machine.decoder.programs)] if machine.decoder else []
    pairs += [(outline.first_draws.programs, machine.prefiller.programs)] if machine.prefiller else []
    pairs += [(a.programs, b.programs) for a, b in zip(outline.docks.values(), machine.docks.values(), strict=True)]
    return [pair for ours, theirs in pairs for pair in zip(ours, theirs, strict=True)]


def zeros(shape):
    return jax.device_put(jnp.zeros(shape.shape, shape.dtype), shape.sharding)


def test_an_outline_lists_every_program_of_a_warm_pair_and_no_other():
    """Each task, run with zeros by the machine's own program, finds it compiled; and nothing compiled is left over."""
    source = stacks.open_machine(Role.PREFILL, stacks.HALVES, jax.devices()[:2])
    destination = stacks.open_machine(Role.DECODE, stacks.HALVES, jax.devices()[4:8], pp=2)
    source.warm(peers=[destination])
    destination.warm()
    outlines = outline_like(source), outline_like(destination)
    tasks = [*outlines[0].tasks(), *outlines[1].tasks(), *shipments(*outlines)]
    real = {
        id(ours): theirs for pair in zip((source, destination), outlines, strict=True) for ours, theirs in twins(*pair)
    }
    before, seen = source.num_compiled + destination.num_compiled, set()
    for task in tasks:
        program = real[id(task.program)]
        jax.block_until_ready(program(*jax.tree.map(zeros, task.arguments)))
        assert source.num_compiled + destination.num_compiled == before, f"{task.kind} of {task.size} has other shapes"
        shapes = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(task.arguments)]
        seen.add((id(program), str(shapes)))
    assert len(seen) == before, "a program that was compiled is not in the outline"


def devices(target: str):
    """Of a target; skips where its compiler is not installed."""
    monkey = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        monkey.setenv(name, value)
    parsed = Target.parse(target)
    try:
        check_compiler(parsed.chip)
    except Exception as error:
        pytest.skip(str(error))
    return devices_of(parsed)


def worker(role: Role, num_pages: int, stages: int) -> WorkerConfig:
    return WorkerConfig(WorkerId(role), role, num_pages, 64, 8192, 16 * stages, stages, (256,), (128,), 4)


def assert_sound(outline, tasks, target):
    """All compile with pools in place, no copy of them, the collectives expected, and the devices hold the sum."""
    checked = check([(outline.config.worker, task) for task in tasks if task.kind in KINDS], every=False)
    assert not [(each.task.kind, why) for each in checked for why in each.complaints]
    memory = memory_of(outline, checked)
    assert memory and all(stage.total_bytes < Target.parse(target).chip.memory_bytes for stage in memory), memory
    assert all(stage.kv_bytes >= outline.pool_bytes(stage.stages[0]) for stage in memory)


KINDS = ("decode", "prefill", "head", "score")
# Stages of few layers, of the shapes of the whole model's: first, middle and last.
DECODE = [
    ("v5e:2x2", LLAMA_3_8B, 1, 8192),
    ("v6e:2x2", LLAMA_3_8B, 2, 8192),
    ("v5p:2x2x2", LLAMA_3_70B, 2, 8192),
    ("h100:8", LLAMA_3_70B, 2, 8192),
    ("h100:2", LLAMA_3_8B, 1, 8192),
]
PREFILL = [
    ("v5e:2x2", LLAMA_3_8B, 4, 4096),
    ("v6e:2x4", LLAMA_3_70B, 8, 4096),
    ("v5p:2x2x2", LLAMA_3_70B, 8, 4096),
    ("h100:4", LLAMA_3_8B, 4, 4096),
]


def few_layers(model, role, target, tp, num_pages):
    """Two layers a stage: two stages for decode, one layer group for prefill."""
    stages = 2 if role is Role.DECODE else 1
    model = replace(model, num_layers=2 * stages)
    layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, 64, "bfloat16")
    layers = [range(2), range(2, 4)][:stages]
    found = devices(target)[: tp * stages]
    return Outline(worker(role, num_pages, stages), model, layout, layers, found, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "model", "tp", "pages"), DECODE, ids=str)
def test_a_decode_pipeline_compiles_in_place_and_fits(target, model, tp, pages):
    outline = few_layers(model, Role.DECODE, target, tp, pages)
    assert_sound(outline, outline.tasks(), target)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "model", "tp", "pages"), PREFILL, ids=str)
def test_a_prefill_mesh_compiles_in_place_and_fits(target, model, tp, pages):
    outline = few_layers(model, Role.PREFILL, target, tp, pages)
    assert_sound(outline, outline.tasks(), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v6e:2x4", "h100:8"])
def test_pages_are_packed_and_inserted_in_place_and_tokens_drawn(target):
    """Prefill TP 2 to decode PP 2: heads are cut anew on the way."""
    source = few_layers(LLAMA_3_8B, Role.PREFILL, target, 2, 4096)
    destination = few_layers(LLAMA_3_8B, Role.DECODE, target, 1, 4096)
    moves = shipments(source, destination)
    draws = [task for task in destination.tasks() if task.kind in ("draw", "draw count", "draw steer")]
    checked = check([(destination.config.worker, task) for task in [*moves, *draws]], every=False)
    assert {each.task.kind for each in checked} >= {"pack", "insert", "draw"}
    assert not [(each.task.kind, why) for each in checked for why in each.complaints]


def test_a_program_that_is_too_large_for_its_chip_is_refused_with_the_numbers():
    outline = few_layers(LLAMA_3_8B, Role.DECODE, "v5e:2x2", 1, 200_000)
    task = next(task for task in outline.tasks() if task.kind == "decode")
    (checked,) = check([(outline.config.worker, task)], every=True)
    assert checked.complaints and "exceeds available HBM (15.75G)" in checked.complaints[0]
    assert CHIPS["v5e"].memory_bytes == int(15.75 * 2**30)
