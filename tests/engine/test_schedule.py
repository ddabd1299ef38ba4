"""The order of products and collectives, read off excerpts of what XLA writes for TPUs and GPUs (half a chunk)."""

from __future__ import annotations

from jdisagg.core.hardware import Collective, Work
from jdisagg.core.schedule import End, Start, Turns
from jdisagg.engine.hlo import parsed, read_collectives
from jdisagg.engine.runner import read_schedule

EIGHT = ((0, 1, 2, 3, 4, 5, 6, 7),)
PRODUCT = Work(2 * (1024 * 1024 + 1024 * 8192 + 1024 * 8192), 0.0, 2.0 * 1024 * 1024 * 8192)
FUSED = """%product.1 (p0: bf16[4,1024,8192], p1: s32[], p2: bf16[1024,1024]) -> bf16[1024,8192] {
  %p0 = bf16[4,1024,8192]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p2 = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(2)
  %cut.1 = bf16[1024,8192]{1,0:T(8,128)(2,1)} fusion(%p0, %p1), kind=kLoop, calls=%cut
  ROOT %convolution.27 = bf16[1024,8192]{1,0:T(8,128)(2,1)} convolution(%p2, %cut.1), dim_labels=bf_io->bf
}
"""
GROUPS = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%sum"
SENT = f"bf16[1024,8192]{{1,0:T(8,128)(2,1)}} all-reduce(%p), {GROUPS}"


def program(body: str, *computations: str) -> str:
    """One whose loop has this body."""
    return "\n".join(
        (
            "HloModule jit_prefill, is_scheduled=true\n",
            FUSED,
            *computations,
            "%body.2 (arg: (s32[], bf16[2048,8192])) -> (s32[], bf16[2048,8192]) {",
            body,
            "  ROOT %tuple.1 = (s32[], bf16[2048,8192]{1,0}) tuple(%i, %x)\n}\n",
            "ENTRY %main.9 (x: bf16[2048,8192]) -> bf16[2048,8192] {",
            "  %while.1 = (s32[], bf16[2048,8192]{1,0}) while(%init), condition=%condition.2, body=%body.2",
            "  ROOT %x.1 = bf16[2048,8192]{1,0} get-tuple-element(%while.1), index=1\n}\n",
        )
    )


def product(name: str) -> str:
    return f"  %{name} = bf16[1024,8192]{{1,0:T(8,128)(2,1)}} fusion(%w, %i, %a), kind=kOutput, calls=%product.1"


def reduced(*, depth: int = 1) -> Collective:
    return Collective("all-reduce", 1024 * 8192 * 2, EIGHT, depth)


def test_an_all_reduce_with_nothing_beside_it_starts_and_ends_at_once():
    hlo = program(f"{product('f')}\n  %psum.3 = {SENT}")
    assert read_schedule(parsed(hlo)) == (Turns((PRODUCT, Start("psum.3", reduced()), End("psum.3"))),)


def test_a_gpus_all_reduce_goes_on_until_it_is_done():
    start = SENT.replace("all-reduce(", "all-reduce-start(")
    done = "bf16[1024,8192]{1,0} all-reduce-done(%all-reduce-start.1)"
    hlo = program(f"  %all-reduce-start.1 = {start}\n{product('f')}\n  %all-reduce-done.1 = {done}")
    between = Start("all-reduce-start.1", reduced()), PRODUCT, End("all-reduce-start.1")
    assert read_schedule(parsed(hlo)) == (Turns(between),)
    assert read_collectives(parsed(hlo)) == (reduced(),)


def test_a_tpus_all_reduce_on_its_sparse_cores_is_a_call_that_products_run_beside():
    called = f"%called_computation (p: bf16[1024,8192]) -> bf16[1024,8192] {{\n  ROOT %all-reduce.4 = {SENT}\n}}\n"
    start = (
        '  %prepare = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"\n'
        "  %ar.start = ((bf16[1024,8192]{1,0:T(8,128)(2,1)}, token[]), bf16[1024,8192]{1,0:T(8,128)(2,1)})"
        ' call-start(%f, %prepare), async_execution_thread="sparsecore", to_apply=%called_computation'
    )
    done = "  %ar.done = bf16[1024,8192]{1,0:T(8,128)(2,1)} call-done(%ar.start)"
    hlo = program("\n".join((product("f"), start, product("g"), product("h"), done)), called)
    between = Start("ar.start", reduced()), PRODUCT, PRODUCT, End("ar.start")
    assert read_schedule(parsed(hlo)) == (Turns((PRODUCT, *between)),)
    assert read_collectives(parsed(hlo)) == (reduced(),)


def test_an_all_reduce_in_steps_that_are_fused_with_products_is_one_and_goes_on_from_the_first_to_the_last():
    step = f'{SENT}, frontend_attributes={{chain_id="0"}}'
    alone = f"%step.1 (p: bf16[1024,8192]) -> bf16[1024,8192] {{\n  ROOT %all-reduce.17 = {step}\n}}\n"
    fused = FUSED.replace("%product.1", "%async_collective_fusion.111").replace(
        "}\n", f"  %all-reduce.19 = {step}\n}}\n"
    )
    shape = "(bf16[1024,8192]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls="
    lines = (
        f"  %async-collective-start = {shape}%step.1",
        f"  %fusion.111 = {shape}%async_collective_fusion.111",
        f"  %async-collective-done = {shape}%step.1",
    )
    hlo = program("\n".join(lines), alone, fused)
    ((start, work, end),) = (turns.events for turns in read_schedule(parsed(hlo)) if isinstance(turns, Turns))
    assert (start, end) == (Start('chain_id="0"', reduced()), End('chain_id="0"'))
    assert isinstance(work, Work) and work.flops == PRODUCT.flops
    assert read_collectives(parsed(hlo)) == (reduced(),)


def test_of_a_kernel_nothing_is_known_so_nothing_hides_behind_it():
    kernel = '  %attention.1 = bf16[1024,8192]{1,0} custom-call(%q, %pool), custom_call_target="tpu_custom_call"'
    assert read_schedule(parsed(program(kernel))) == (Turns(()),)
