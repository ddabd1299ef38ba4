"""Our metrics under the names that dashboards of other servers already know."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from jdisagg.core.errors import ConfigError

# Ours (without the prefix and without _total) -> theirs.
NAMES: dict[str, dict[str, str]] = {
    "vllm": {
        "requests_running": "vllm:num_requests_running",
        "requests_waiting": "vllm:num_requests_waiting",
        "kv_usage_ratio": "vllm:kv_cache_usage_perc",
        "lora_requests_info": "vllm:lora_requests_info",
        "preemptions": "vllm:num_preemptions",
        "spec_decode_drafts": "vllm:spec_decode_num_drafts",
        "spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens",
        "spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
        "prefix_cache_queries": "vllm:prefix_cache_queries",
        "prefix_cache_hits": "vllm:prefix_cache_hits",
        "prompt_tokens": "vllm:prompt_tokens",
        "generation_tokens": "vllm:generation_tokens",
        "requests": "vllm:request_success",
        "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
        "time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
        "request_seconds": "vllm:e2e_request_latency_seconds",
        "request_prompt_tokens": "vllm:request_prompt_tokens",
        "request_generation_tokens": "vllm:request_generation_tokens",
        "shipped_bytes": "vllm:nixl_bytes_transferred",
        "ship_seconds": "vllm:nixl_xfer_time_seconds",
    },
    "jetstream": {
        "requests_waiting": "jetstream_num_requests_waiting",
        "kv_usage_ratio": "jetstream_kv_cache_utilization_perc",
        "requests": "jetstream_request_success_count",
        "time_to_first_token_seconds": "jetstream_time_to_first_token",
        "time_per_output_token_seconds": "jetstream_time_per_output_token",
        "request_seconds": "jetstream_time_per_request",
        "request_prompt_tokens": "jetstream_request_input_length",
        "request_generation_tokens": "jetstream_request_output_length",
    },
}
LABELS = {"vllm": {"worker": "engine", "reason": "finished_reason"}, "jetstream": {"worker": "id"}}


class Aliases(CollectorRegistry):
    """A registry whose samples are those of another one, renamed."""

    def __init__(self, source: CollectorRegistry, kinds: Collection[str]) -> None:
        super().__init__()
        unknown = sorted(set(kinds) - NAMES.keys())
        if unknown:
            raise ConfigError(f"metrics_compat has {unknown[0]!r}, must be of {', '.join(NAMES)}")
        self._source, self._kinds = source, tuple(kinds)

    def collect(self) -> Iterator[Metric]:
        """Every family that has another name there, under that name."""
        families = [*self._source.collect()] if self._kinds else []
        for kind in self._kinds:
            for family in families:
                theirs = NAMES[kind].get(family.name.removeprefix("jdisagg_"))
                if theirs is not None:
                    yield _renamed(family, theirs, LABELS[kind])


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        Sample(
            name + each.name.removeprefix(family.name),
            {labels.get(key, key): value for key, value in each.labels.items()},
            *each[2:],
        )
        for each in family.samples
    ]
    return renamed
