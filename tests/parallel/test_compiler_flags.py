"""What compilers are told: the table, and that one which no compiler knows breaks nothing."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import pytest

from jdisagg.parallel import compiler_flags
from jdisagg.parallel.compiler_flags import AS_STORED, COMPILER_FLAGS, CompilerOption, options_for


class Version(NamedTuple):
    platform_version: str = "1"
    device_count: Callable[[], int] = lambda: 4


class Chip(NamedTuple):
    device_kind: str
    client: Version
    platform: str = "tpu"


def test_a_cpus_programs_are_told_nothing_but_to_move_pages_as_they_are_stored():
    cpu = jax.devices("cpu")[0]
    assert options_for(cpu, as_stored=False, devices=4) is None
    assert options_for(cpu, as_stored=True, devices=1) == AS_STORED


def test_programs_of_one_tpu_are_told_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_flags, "_accepted", lambda name, value, device: True)
    assert options_for(Chip("TPU v5", Version()), as_stored=False, devices=1) is None


@pytest.mark.parametrize("devices", [1, 4])
def test_no_program_of_a_gpu_computes_twice_what_fits(devices: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_flags, "_accepted", lambda name, value, device: True)
    told = options_for(Chip("NVIDIA H100 80GB HBM3", Version(), "gpu"), as_stored=False, devices=devices)
    assert told == {"xla_disable_hlo_passes": "rematerialization"}


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v5 lite", "TPU v6 lite", "TPU7x"])
def test_each_kind_of_tpu_has_one_way_of_summing_beside_products(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_flags, "_accepted", lambda name, value, device: True)
    compiler_flags.forget()
    told = options_for(Chip(kind, Version()), as_stored=False, devices=4)
    assert told is not None
    sparse = "xla_tpu_enable_sparse_core_collective_offload_all_reduce" in told
    fused = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce" in told
    assert sparse != fused and fused == (kind == "TPU v5 lite")


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v6 lite", "TPU7x"])
def test_programs_of_a_part_of_a_slice_are_not_left_to_the_sparse_cores_which_send_nothing_for_them(kind, monkeypatch):
    monkeypatch.setattr(compiler_flags, "_accepted", lambda name, value, device: True)
    fused = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"
    chip = Chip(kind, Version())
    whole, part = (options_for(chip, as_stored=False, devices=devices) for devices in (4, 2))
    assert whole is not None and part is not None
    assert fused not in whole and part[fused] is True and part["xla_enable_async_all_reduce"] is True


def test_only_programs_that_have_products_beside_small_sums_send_them_by_the_sparse_cores(monkeypatch):
    monkeypatch.setattr(compiler_flags, "_accepted", lambda name, value, device: True)
    compiler_flags.forget()
    alone, told = (
        options_for(Chip("TPU v5", Version()), as_stored=False, devices=4, beside=beside) for beside in (False, True)
    )
    name = "xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes"
    assert alone is not None and told == {**alone, name: compiler_flags.SENT_BESIDE_BYTES} != alone


def test_a_flag_that_the_compiler_does_not_know_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(compiler_flags, "COMPILER_FLAGS", (CompilerOption("xla_nobody_knows", True, ("cpu",), ""),))
    compiler_flags.forget()
    device = jax.devices("cpu")[0]
    with caplog.at_level(logging.WARNING):
        assert compiler_flags._known("cpu", "9", False, device) == ()
    assert "has no flag xla_nobody_knows=True: it is left out" in caplog.text


def test_every_flag_has_a_reason_and_devices_it_is_for():
    assert all(each.reason and each.kinds for each in COMPILER_FLAGS)
    assert len({each.name for each in COMPILER_FLAGS}) == len(COMPILER_FLAGS)


@pytest.fixture(autouse=True)
def _asked_anew():
    yield
    compiler_flags.forget()
