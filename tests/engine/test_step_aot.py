"""Steps beyond the plain one, compiled to the end for chips that are not there: several turns, chunks beside them, and
pages that are quantised. `checked_kinds` holds that pools are written in place and no matrix copied.
"""

import pytest

from jdisagg.core.worker_config import Role, Stages
from jdisagg.engine.programs import ProgramTable
from tests.engine.chips import checked_kinds, few_layers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_kept_programs")]


def test_several_turns_of_a_dispatch_write_their_pages_in_place():
    table = few_layers("8B", Role.DECODE, "v6e:1x1", 1, stages=1, layers=2, num_pages=4096, decode=Stages(1, 4))
    (checked,) = checked_kinds(table, table.steps(), "turns plain")
    logits = table.model.vocab_size * table.config.num_slots * 4
    assert checked.facts.temp_bytes < 4 * logits, "and keep no turn's logits for the next"


def test_a_mixed_step_of_many_slots_holds_its_logits_once_besides_and_copies_no_matrix():
    sizes = {"mixed_steps": True, "short_prompt_tokens": 64, "num_slots": 256, "max_chunk_seqs": 32}
    table = few_layers("8B", Role.DECODE, "v6e:1x1", 1, stages=1, layers=1, num_pages=4096, chunk_tokens=64, **sizes)
    (checked,) = checked_kinds(table, table.steps(), "mixed")
    logits, matrix = (256 + 64) * table.model.vocab_size * 4, 2 * 4096 * 4096
    assert checked.facts.temp_bytes < logits + matrix


@pytest.mark.parametrize(("target", "dtype"), [("v5e:1x1", "int8"), ("h100:1", "float8_e4m3fn")])
def test_a_decode_step_writes_quantised_pages_in_place_and_makes_no_wide_copy_of_them(target: str, dtype: str):
    table = few_layers("8B", Role.DECODE, target, 1, stages=1, layers=2, num_pages=4096, kv_dtype=dtype)
    (checked,) = checked_kinds(table, table.steps(), "decode")
    assert checked.facts.temp_bytes < table.pool_bytes(0, 1) // 4


@pytest.mark.parametrize(("num_pages", "pools"), [(8190, 1), (12_287, 2), (20_000, 1)])  # 2, 3 and 4.9 GiB
def test_layers_that_fill_2_to_4_gib_of_bytes_together_have_a_pool_each(num_pages: int, pools: int):
    """Kernels reach all of those."""
    table = few_layers("8B", Role.DECODE, "h100:1", 1, stages=1, layers=2, num_pages=num_pages, kv_dtype="int8")
    assert held(table) == {pools}
    if pools == 2:
        (checked,) = checked_kinds(table, table.steps(), "decode")
        assert checked.facts.temp_bytes < table.pool_bytes(0, 1) // 4
    assert held(few_layers("8B", Role.DECODE, "h100:1", 1, stages=1, layers=2, num_pages=num_pages // 2)) == {1}


def held(table: ProgramTable) -> set[int]:
    """How many pools the table's decode steps are given."""
    return {len(each.pools or ()) for each in table.steps() if each.kind == "decode"}
