"""Where a process stands: what the flag says, and what is read from the environment where it says nothing."""

import pytest

from jdisagg import terminal
from jdisagg.core.errors import ConfigError
from jdisagg.core.labels import Labels


def here(text="", **environment):
    return terminal.here(text, environment, "box", 7)


def test_a_bare_machine_is_a_host_and_a_process():
    assert here() == Labels(process="box/7", host="box")


def test_the_flag_wins_over_the_environment():
    assert here("host=h,rack=r", NODE_NAME="node", NODE_RACK="other", NODE_BLOCK="pod") == Labels(
        "box/7", "h", "r", "", "pod"
    )


def test_slurms_tree_names_the_rack_and_the_pod():
    found = here(SLURM_TOPOLOGY_ADDR="spine.leaf7.n3", SLURM_TOPOLOGY_ADDR_PATTERN="switch.switch.node")
    assert (found.rack, found.pod) == ("leaf7", "spine")
    flat = here(SLURM_TOPOLOGY_ADDR="n3", SLURM_TOPOLOGY_ADDR_PATTERN="node", SLURMD_NODENAME="n3")
    assert (flat.host, flat.rack, flat.pod) == ("n3", "", "")


def test_kubernetes_and_tpu_variables_name_slices_within_their_job():
    one, other = (here(LWS_NAME=name, LWS_GROUP_INDEX="0", NODE_NAME="n") for name in ("decode", "prefill"))
    assert (one.host, one.slice, one.pod) == ("n", "decode/0", "")
    assert one.slice != other.slice, "the groups of two jobs are both number 0"
    assert here(TPU_NAME="v5p-a", MEGASCALE_SLICE_ID="2").slice == "v5p-a/2" and here(TPU_NAME="b").slice == "b"


def test_what_a_scheduler_says_is_never_a_mistake():
    odd = here(NODE_NAME="a,b=c\n" * 100)
    odd.check("worker")
    assert Labels.parse(str(odd)) == odd


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rak=1", "'rak=1' is none of process=NAME, host=NAME"),
        ("rack", "'rack' is none of"),
        ("rack=a,rack=b", "rack is 'a' and 'b'"),
        ("host=" + "x" * 200, "must be printable and at most 128"),
    ],
)
def test_a_label_that_cannot_be_is_refused_with_its_value(text, says):
    with pytest.raises(ConfigError, match=says):
        Labels.parse(text)
