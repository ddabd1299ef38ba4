"""Experts' products are tuned by whose code runs and how wide its blocks are, for all numbers of rows at once."""

import jax
import numpy as np
import pytest

from pallas_kernels import tune, tune_products, tuning
from pallas_kernels.grouped_product import hopper, reference
from pallas_kernels.tuning import MOSAIC

TINY = "4x64x96x2"


def test_a_model_is_two_products_whose_rows_are_of_the_experts_that_tokens_ask():
    up, down = tune_products.products_of([TINY], [8, 1], ["bfloat16/bfloat16", "bfloat16/int8"])
    assert up[1:] == (4, 64, 192, "bfloat16", (2, 16)) and down[1:] == (4, 96, 64, "bfloat16", (2, 16))
    assert not tune_products.products_of([""], [8], ["bfloat16/bfloat16"])


def test_both_codes_are_tried_where_mosaic_s_can():
    up, down = tune_products.products_of([TINY], [1], ["bfloat16/bfloat16"])
    wide = [{MOSAIC: 1, "outputs": width} for width in (192, 64)]
    assert list(tune.candidates("gpu", up)) == [{}, {MOSAIC: 0}, *wide]
    assert list(tune.candidates("gpu", down)) == [{}, {MOSAIC: 0}]  # sums over 96


def test_the_code_that_is_timed_gives_products_and_few_rows_are_timed_as_often_as_they_are_fewer():
    (work, _) = tune_products.products_of([TINY], [1, 4], ["float32/float32"])
    matrices, *pairs = tune.arguments_of(work)
    found = tune.kernel_of("gpu", work, {MOSAIC: 0}, interpret=False)(matrices, *pairs)
    assert [len(each) for each in found] == [2, 2, 2, 2, 8]
    for x, sizes, each in ((*pairs[:2], found[0]), (*pairs[2:], found[-1])):
        wanted = reference.grouped_product(x, matrices, sizes, out_first=False)
        np.testing.assert_allclose(each, wanted, rtol=1e-5)


@pytest.mark.parametrize("width", [64, 192])
def test_a_candidate_is_cut_as_the_choice_will_be(width, monkeypatch):
    work = tune_products.products_of([TINY], [1, 400], ["bfloat16/bfloat16"])[0]
    told = []
    monkeypatch.setattr(hopper, "grouped_product", lambda x, *_, blocks, **__: told.append(blocks) or x)
    tune.kernel_of("gpu", work, {MOSAIC: 1, "outputs": width}, interpret=False)(*tune.arguments_of(work))
    monkeypatch.setattr(tuning, "TUNED", {tuple(work.key()): {MOSAIC: 1, "outputs": width}})
    assert told == [hopper.choose_blocks(rows, work.matrices, out_first=False) for rows in work.rows]
    assert {each.warpgroups for each in told} == {1, 2}


def test_what_is_measured_is_kept_by_the_matrices_and_not_measured_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(tune, "platform_here", lambda _: "gpu")
    monkeypatch.setattr(tune, "works_of", lambda *_, **__: [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    table: dict = {}
    monkeypatch.setattr(tune, "TUNED", table)
    arguments = [f"--experts={TINY}", f"--out={tmp_path / 'tuned.py'}", "--rows=1"]
    tune.main(arguments)
    assert "2 choices" in capsys.readouterr().out
    works = tune_products.products_of([TINY], [1], ["bfloat16/bfloat16"])
    table.update({tuple(work.key()): {} for work in works})
    tune.main([*arguments, "--missing"])
    assert "the rule" not in capsys.readouterr().out
