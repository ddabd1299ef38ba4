"""Between processes as within one, all of it by TLS: other pages on the two sides, and KV quantised for the way."""

from __future__ import annotations

import pytest

from tests.serve.cluster.processes import Cluster

DIFFERENT = ("--prefill_page_size=32", "--transfer_compress=int8", "--transport=tcp", "--prefix_caching=off")


@pytest.mark.slow
def test_kv_of_other_pages_crosses_quantised_by_tls_and_nothing_is_compiled_for_it(
    cluster: Cluster, certificate: tuple[str, str]
):
    key, cert = certificate
    tls = (f"--tls_key={key}", f"--tls_cert={cert}", f"--tls_ca={cert}")
    cluster.mesh = "prefill:tp1,decode:pp2"
    cluster.start("router,decode", *DIFFERENT, *tls)
    prefill = cluster.start("prefill", *DIFFERENT, *tls)
    cluster.await_ready()
    prompt = "def mean(numbers):\n    return sum(numbers) / len(numbers)\n\n\ndef median(numbers):\n" * 3
    answers = [cluster.ask(prompt=prompt, max_tokens=24, temperature=0) for _ in range(2)]
    assert all(answer.error is None for answer in answers)
    assert answers[0].text == answers[1].text and len(answers[0].text) > 10
    assert prefill.said("KV crosses by tcp")
    assert [value for _, value in cluster.samples("recompiles")] == [0]
    assert not any(value for _, value in cluster.samples("parts_resent_total")), "all came as int8, and was taken"
    assert sum(value for _, value in cluster.samples("ship_seconds_count")) >= 2
    cluster.await_all_free()
