"""The digest of what a process dispatched, and the comparison of several processes'."""

from __future__ import annotations

from jdisagg.core.dispatch_digest import DigestComparison, RunningDigest


def digest_of(*texts: str) -> str:
    digest = RunningDigest()
    for each in texts:
        digest.note(each)
    return digest.now


def test_the_same_programs_in_the_same_order_have_one_digest() -> None:
    assert digest_of("prefill (3, 64)", "pack (4,)") == digest_of("prefill (3, 64)", "pack (4,)")


def test_another_order_another_shape_and_another_cut_of_the_same_text_have_others() -> None:
    first = digest_of("prefill (3, 64)", "pack (4,)")
    assert first != digest_of("pack (4,)", "prefill (3, 64)")
    assert first != digest_of("prefill (3, 64)", "pack (16,)")
    assert first != digest_of("prefill (3, 64)p", "ack (4,)")


def test_reading_a_digest_does_not_change_what_follows() -> None:
    digest = RunningDigest()
    digest.note("a")
    assert digest.now == digest.now == digest_of("a")
    digest.note("b")
    assert digest.now == digest_of("a", "b")


def test_a_difference_names_the_member_the_step_and_both_digests_whoever_is_first() -> None:
    said = "member 2 is out of step: at step 32 its digest of what it dispatched is bb, ours aa"
    late, early = DigestComparison(), DigestComparison()
    assert late.ours(32, "aa") is None
    assert late.theirs(1, 32, "aa") is None and late.theirs(2, 32, "bb") == said
    assert early.theirs(1, 32, "aa") is None and early.theirs(2, 32, "bb") is None
    assert early.ours(32, "aa") == said


def test_only_the_latest_steps_are_kept() -> None:
    comparison = DigestComparison(kept=2)
    for step in range(5):
        assert comparison.ours(step, "aa") is None
    assert comparison.theirs(1, 0, "bb") is None, "forgotten, and so not compared"
    assert comparison.theirs(1, 4, "bb") is not None
