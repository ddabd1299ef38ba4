"""A router without workers: it needs neither an accelerator nor the memory that the workers' KV takes."""

import pytest

from jdisagg import launch
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.serve.deploy.deployment import resolve_deployment
from tests.cluster.test_job_files import ROOT

LARGE = Settings(
    role="router", platform="gpu", mesh="prefill:tp8,decode:pp4tp2", model=str(ROOT / "configs" / "llama3_70b")
)


def test_a_router_alone_takes_no_device_of_its_workers_platform():
    found, platform = launch.devices_of(LARGE, 0)
    assert platform == "gpu" and {each.platform for each in found} == {"cpu"}


def test_a_router_alone_needs_no_room_for_the_workers_sequences():
    deployment = resolve_deployment(LARGE, "gpu", None, sized=False)
    assert deployment.dtype == "bfloat16" and {each.num_pages for each in deployment.workers} == {256}
    with pytest.raises(ConfigError, match="room for"):
        resolve_deployment(LARGE, "gpu", None)
