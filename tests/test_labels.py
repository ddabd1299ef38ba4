"""Where a process stands: what the flag says, and what is read from the environment where it says nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg import labels
from jdisagg.core.errors import ConfigError
from jdisagg.core.labels import NAMES, Labels, LinkClass, link_class

names = st.sampled_from(["", "a", "b"])
places = st.builds(Labels, names, names, names, names, names)


def here(text="", **environment):
    return labels.here(text, environment, "box", 7)


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


@given(places, places)
def test_a_link_is_of_the_nearest_place_that_both_share_and_the_same_both_ways(one, other):
    found = link_class(one, other)
    assert found is link_class(other, one)
    shared = {name for name in NAMES if getattr(one, name) and getattr(one, name) == getattr(other, name)}
    order = ("process", "host", "rack", "slice", "pod")
    nearest = next((name for name in order if name in shared), "beyond")
    assert found is LinkClass("rack" if nearest == "slice" else nearest)


@given(places)
def test_labels_read_back_as_they_were_written(place):
    assert Labels.parse(str(place)) == place
