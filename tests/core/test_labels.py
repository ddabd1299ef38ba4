"""Labels as text, and which kind of link lies between two places."""

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.codec import decode, encode
from jdisagg.core.labels import NAMES, Labels, LinkClass, link_class
from jdisagg.core.worker_config import Role
from tests.sim.cases import worker

names = st.sampled_from(["", "a", "b"])
places = st.builds(Labels, names, names, names, names, names)


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


@given(places)
def test_a_worker_tells_another_process_where_it_stands(place):
    config = worker("p", Role.PREFILL, labels=place, kv_token_bytes=7)
    config.check()
    assert decode(encode(config)) == config
