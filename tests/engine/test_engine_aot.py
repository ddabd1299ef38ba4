"""The engine's real programs, compiled to the end for TPUs and GPUs that are not there: decode and shipments."""

import jax
import jax.numpy as jnp
import pytest

from jdisagg.core.worker_config import Role
from jdisagg.engine.abstract_programs import AbstractPrograms, shipments
from jdisagg.engine.compile_check import check
from tests.engine import stacks
from tests.engine.chips import assert_sound, checked_kinds, few_layers


def outline_like(machine):
    """The outline of a machine that exists, on its devices."""
    layers = [group.layers for group in machine.layer_groups]
    devices = list(dict.fromkeys(device for group in machine.layer_groups for device in group.submesh.devices))
    layout = machine.layer_groups[0].kv.layout
    return AbstractPrograms(machine.config, machine.model, layout, layers, devices, jnp.float32)


def twins(machine, outline):
    """(the outline's program, the machine's) of everything."""
    pairs = [(a.programs, b.programs) for a, b in zip(outline.layer_groups, machine.layer_groups, strict=True)]
    pairs += [(outline.draws.programs, machine.runner.decoder.programs)] if machine.runner.decoder else []
    pairs += [(outline.first_draws.programs, machine.runner.prefiller.programs)] if machine.runner.prefiller else []
    transfers = outline.transfer_programs.values(), machine.transfer_programs.values()
    pairs += [(a.programs, b.programs) for a, b in zip(*transfers, strict=True)]
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


def test_an_outline_lists_every_program_of_a_warm_executor_that_mixes():
    machine = stacks.open_machine(Role.COLOCATED, stacks.HALVES, jax.devices()[:2], pp=2, mixed_steps=True)
    machine.warm()
    outline = outline_like(machine)
    real, before = {id(ours): theirs for ours, theirs in twins(machine, outline)}, machine.num_compiled
    tasks = outline.tasks()
    assert [task.stage for task in tasks if task.kind == "mixed"] == [0, 1]
    for task in tasks:
        jax.block_until_ready(real[id(task.program)](*jax.tree.map(zeros, task.arguments)))
        assert machine.num_compiled == before, f"{task.kind} of {task.size} has other shapes"


# Two stages of two layers: one has the embedding, the other the head.
DECODE = [
    ("v5e:2x2", "8B", 1),
    ("v6e:2x2", "8B", 2),
    ("v5p:2x2x2", "70B", 2),
    ("h100:8", "70B", 2),
]


@pytest.mark.slow
@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize(("target", "model", "tp"), DECODE)
def test_a_decode_pipeline_compiles_in_place_and_fits(target, model, tp):
    outline = few_layers(model, Role.DECODE, target, tp, stages=2, layers=2, num_pages=8192)
    assert_sound(outline, target, "decode")


@pytest.mark.slow
@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize("target", ["v6e:2x4", "h100:8"])
def test_pages_are_packed_and_inserted_in_place_and_tokens_drawn(target):
    """Prefill TP 2 to decode PP 2: shards are joined on the way."""
    source = few_layers("8B", Role.PREFILL, target, 2, stages=2, layers=2, num_pages=4096)
    destination = few_layers("8B", Role.DECODE, target, 1, stages=2, layers=2, num_pages=4096)
    checked_kinds(destination, shipments(source, destination), "pack", "insert")
    checked_kinds(destination, destination.tasks(), "draw", "draw count", "draw steer")


@pytest.mark.usefixtures("no_kept_programs")
def test_a_program_that_is_too_large_for_its_chip_is_refused_with_the_numbers():
    outline = few_layers("8B", Role.DECODE, "v5e:2x2", 1, stages=2, layers=2, num_pages=200_000)
    task = next(task for task in outline.tasks() if task.kind == "decode")
    (checked,) = check([(outline.config.worker, task)], every=True)
    assert checked.complaints and "exceeds available HBM (15.75G)" in checked.complaints[0]
