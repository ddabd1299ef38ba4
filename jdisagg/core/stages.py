"""Where a decode pipeline is cut: layers over stages by cost, so that embedding and logits slow no stage down."""

from __future__ import annotations

from jdisagg.core.errors import MeshError
from jdisagg.core.model_config import ModelConfig


def head_cost(config: ModelConfig) -> float:
    """The head's weights in units of one layer's: what the last stage carries besides its layers."""
    return config.head_params() / config.layer_params()


def split_layers(config: ModelConfig, num_stages: int) -> tuple[range, ...]:
    """Consecutive, non-empty runs of layers whose most costly stage is as cheap as can be.

    Decode reads every weight once a step, so weights are the cost; the embedding is a lookup and costs nothing.
    Raises MeshError where there are more stages than layers.
    """
    if num_stages > config.num_layers:
        raise MeshError(f"{num_stages} stages (pp) for {config.num_layers} layers: at most one stage a layer")
    extra = head_cost(config)
    last = min(
        range(1, config.num_layers - num_stages + 2),
        key=lambda layers: (_slowest(config.num_layers - layers, num_stages - 1, layers + extra), -layers),
    )
    if num_stages == 1:
        return (range(config.num_layers),)
    even, odd = divmod(config.num_layers - last, num_stages - 1)
    sizes = [even + (stage < odd) for stage in range(num_stages - 1)] + [last]
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))


def _slowest(layers: int, stages: int, last_cost: float) -> float:
    return max(last_cost, -(-layers // stages) if stages else 0)
