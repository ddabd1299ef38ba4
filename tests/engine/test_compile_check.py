"""What is compiled for chips that are not there, side by side where the compiler bears it."""

import os

from jdisagg.engine.compile_check import MOST_AT_ONCE, at_once


def test_programs_of_gpus_are_compiled_side_by_side_and_those_of_tpus_one_after_the_other():
    cores = len(os.sched_getaffinity(0))
    assert at_once({"gpu"}) == at_once({"cpu", "gpu"}) == min(cores, MOST_AT_ONCE)
    assert at_once({"tpu"}) == at_once({"cpu", "tpu"}) == 1
