"""What may leave after a chunk: every (page, layer) once, and none that is still to be written."""

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.worker_config import Role, TransferMode, WorkerConfig
from jdisagg.policy.parts import Piece, pieces
from tests.sim.cases import worker

GROUPS = ((0, 3), (3, 7), (7, 8))


def config(**sizes) -> WorkerConfig:
    return worker("prefill-0", Role.PREFILL, page_size=4, layer_groups=GROUPS, **sizes)


def test_a_whole_transfer_waits_for_the_last_chunk():
    assert pieces(TransferMode.WHOLE, config(), 0, 8, 10) == ()
    assert pieces(TransferMode.WHOLE, config(), 0, 10, 10) == (Piece(0, 3, None),)


def test_a_chunk_sends_the_pages_it_completed_and_the_last_one_the_rest():
    assert pieces(TransferMode.CHUNK, config(), 0, 7, 18) == (Piece(0, 1, None),)
    assert pieces(TransferMode.CHUNK, config(), 1, 7, 18) == ()
    assert pieces(TransferMode.CHUNK, config(), 1, 18, 18) == (Piece(1, 5, None),)


def test_layer_groups_leave_one_by_one_in_their_order():
    assert pieces(TransferMode.LAYER, config(), 0, 8, 10) == tuple(Piece(0, 2, run) for run in GROUPS)


def test_a_single_group_is_all_layers():
    alone = worker("prefill-0", Role.PREFILL, layer_groups=((0, 8),))
    assert pieces(TransferMode.LAYER, alone, 0, 8, 10) == (Piece(0, 2, None),)


def test_the_tokens_of_a_piece_end_with_the_prompt():
    assert [Piece(start, start + 2, None).num_tokens(10, 4) for start in (0, 1)] == [8, 6]


@given(st.sampled_from(TransferMode), st.integers(1, 40), st.lists(st.integers(1, 16), max_size=6), st.integers(0, 3))
def test_every_page_and_layer_leaves_once_and_only_when_it_is_whole(mode, total, chunks, cached):
    sizes, sent, computed, left = config(), min(cached, total // 4), 0, []
    first = sent
    for tokens in [*chunks, total]:
        computed = min(total, computed + tokens)
        cut = pieces(mode, sizes, sent, computed, total)
        assert all(piece.stop * 4 <= computed or computed == total for piece in cut)
        left += [
            (page, layers) for piece in cut for page in range(piece.start, piece.stop) for layers in [piece.layers]
        ]
        sent = cut[-1].stop if cut else sent
    pages = range(first, sizes.pages_for(total))
    runs = GROUPS if mode is TransferMode.LAYER else (None,)
    assert sorted(left, key=str) == sorted(((page, run) for page in pages for run in runs), key=str)
