from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role
from jdisagg.policy.routing import WorkerLook, choose_pair

looks = st.lists(
    st.builds(
        WorkerLook,
        st.integers(0, 9).map(lambda n: WorkerId(f"w{n}")),
        st.sampled_from(Role),
        st.floats(0, 100),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda look: look.worker,
)


def look(name, role, work=0.0, *, served=0, room=True, avoided=False):
    return WorkerLook(WorkerId(name), role, work, served, room, avoided)


def taken(*given):
    pair = choose_pair(given).taken
    return pair and (pair.prefill, pair.decode)


def test_the_least_outstanding_work_is_taken():
    p0, p1 = look("p0", Role.PREFILL, 5), look("p1", Role.PREFILL, 3)
    d0, d1 = look("d0", Role.DECODE, 1), look("d1", Role.DECODE, 2)
    assert taken(p0, p1, d0, d1) == ("p1", "d0")


def test_a_worker_that_failed_the_request_is_taken_only_where_there_is_no_other():
    p0, p1 = look("p0", Role.PREFILL, 0, avoided=True), look("p1", Role.PREFILL, 9)
    d0 = look("d0", Role.DECODE)
    assert taken(p0, p1, d0) == ("p1", "d0")
    assert taken(p0, d0) == ("p0", "d0")


def test_idle_workers_take_turns():
    assert taken(look("p0", Role.PREFILL, served=2), look("p1", Role.PREFILL, served=1), look("d", Role.DECODE)) == (
        "p1",
        "d",
    )


def test_a_colocated_worker_pairs_only_with_itself():
    pairs = choose_pair([look("c0", Role.COLOCATED, 2), look("c1", Role.COLOCATED, 1), look("d0", Role.DECODE)]).weighed
    assert [(pair.prefill, pair.decode) for pair in pairs] == [("c1", "c1"), ("c0", "c0")]


def test_no_room_means_no_pair():
    assert taken(look("p0", Role.PREFILL), look("d0", Role.DECODE, room=False)) is None


@given(looks)
def test_the_choice_shows_every_pair_it_weighed_best_first(given):
    choice = choose_pair(given)
    by_name = {each.worker: each for each in given}
    assert list(choice.weighed) == sorted(choice.weighed, key=lambda pair: pair.score)
    assert choice.taken == (choice.weighed[0] if choice.weighed else None)
    for pair in choice.weighed:
        prefill, decode = by_name[pair.prefill], by_name[pair.decode]
        assert prefill.role.prefills and decode.role.decodes and prefill.has_room and decode.has_room
