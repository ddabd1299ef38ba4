"""The happy paths and the failures of a whole cluster in virtual time: outputs are those of the definition, always."""

import pytest

from jdisagg.core.request import FinishReason, Request, RequestId, SamplingParams, WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.engine.toy import toy_output
from jdisagg.sim.world import World


def worker(name, role, **sizes):
    given = {
        "num_pages": 64,
        "page_size": 4,
        "max_model_len": 128,
        "num_slots": 4,
        "prefill_buckets": (8, 16),
        "table_buckets": (4, 8, 32),
        "max_chunk_seqs": 4,
        **sizes,
    }
    return WorkerConfig(worker=WorkerId(name), role=role, **given)


def pair(**sizes):
    return [worker("prefill-0", Role.PREFILL, **sizes), worker("decode-0", Role.DECODE, **sizes)]


def request(name, prompt_tokens, **sampling):
    prompt = tuple((7 * i + sum(map(ord, name))) % 97 for i in range(prompt_tokens))
    return Request(RequestId(name), prompt, SamplingParams(**{"max_tokens": 8, **sampling}))


def check_outputs(world, requests):
    for each in requests:
        assert [finish.reason for finish in world.finished[each.request_id]] == [
            FinishReason.STOP if toy_stops(each) else FinishReason.LENGTH
        ]
        assert world.output(each.request_id) == toy_output(each.prompt, each.sampling)
    world.check_all_ended()


def toy_stops(each):
    return toy_output(each.prompt, each.sampling)[-1] in each.sampling.stop_token_ids


@pytest.mark.parametrize(
    "workers",
    [
        pair(),
        pair(num_microbatches=2),
        [worker("colocated-0", Role.COLOCATED)],
        [worker("colocated-0", Role.COLOCATED, num_microbatches=2), worker("colocated-1", Role.COLOCATED)],
        [*pair(), worker("prefill-1", Role.PREFILL), worker("decode-1", Role.DECODE)],
    ],
)
def test_every_output_is_the_definition_on_every_layout(workers):
    world = World(workers)
    requests = [request(f"r{i}", 1 + 5 * i % 60, max_tokens=1 + 3 * i % 20) for i in range(24)]
    for each in requests:
        world.submit(each)
    world.run()
    check_outputs(world, requests)
