"""What is read off compiled programs: which collectives, and how many bytes."""

from __future__ import annotations

from jdisagg.core.hardware import Collective, counted
from jdisagg.engine.hlo import parsed, read_collectives

HLO = """HloModule jit_own, is_scheduled=true

%region_1.2 (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %b)
}

%called.7 (p: bf16[2,8]) -> bf16[2,8] {
  %c = (bf16[2,8], bf16[2,8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}

%body.3 (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %all-reduce.9 = f32[4,8]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%region_1.2
  %fusion.1 = bf16[2,8]{1,0} fusion(%y), kind=kLoop, calls=%called.7
  ROOT %tuple = (s32[], f32[4,8]) tuple(%i, %all-reduce.9)
}

%condition.3 (arg: (s32[], f32[4,8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main.4_spmd (p0: f32[4,8]) -> f32[4,8] {
  %ag = (bf16[1,32]{1,0}, bf16[4,32]{1,0}) all-gather-start(%p), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %ag.done = bf16[4,32]{1,0} all-gather-done(%ag)
  %while.2 = (s32[], f32[4,8]{1,0}) while(%init), condition=%condition.3, body=%body.3
  ROOT %rs = f8e4m3fn[8]{0} reduce-scatter(%z), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%region_1.2
}
"""


def test_collectives_are_read_with_their_bytes_groups_and_loops():
    assert set(read_collectives(parsed(HLO))) == {
        Collective("collective-permute", 32, ((0, 1), (1, 2), (2, 3), (3, 0)), 1),
        Collective("all-reduce", 128, ((0, 1), (2, 3)), 1),
        Collective("all-gather", 256, ((0, 2), (1, 3)), 0),
        Collective("reduce-scatter", 32, ((0, 1, 2, 3),), 0),
    }
    within = HLO.replace(
        "  %fusion.1 =", "  %while.1 = (s32[]) while(%y), condition=%condition.3, body=%body.2\n  %fusion.1 ="
    )
    within += (
        "\n%body.2 (arg: (s32[])) -> (s32[]) {\n  %psum.1 = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}\n}\n"
    )
    assert Collective("all-reduce", 32, ((0, 1), (2, 3)), 2) in read_collectives(parsed(within))
    assert counted(read_collectives(parsed(HLO))) == {kind.kind: 1 for kind in read_collectives(parsed(HLO))}
