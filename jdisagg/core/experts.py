"""The numbers of a mixture of experts (Shazeer et al. 2017): what a layer has in place of one MLP."""

from __future__ import annotations

from dataclasses import dataclass

ROUTERS = (
    "softmax",  # probabilities over all experts, the likeliest are taken (Switch, Mixtral, Qwen, DeepSeek-V2)
    "chosen",  # the highest logits are taken, probabilities over those alone (gpt-oss)
    "sigmoid",  # each expert's own score; a correction is added for the choice alone (DeepSeek-V3)
)


@dataclass(frozen=True, slots=True)
class Experts:
    """`number` gated MLPs of `width` channels, of which every token is sent to `per_token`."""

    number: int
    per_token: int
    width: int
    router: str = "softmax"
    normalised: bool = False  # the weights of a token's experts are made to sum to 1
    scale: float = 1.0  # of those weights, at last
    groups: int = 1  # experts lie in so many groups, and a token's are all of `kept_groups` of them
    kept_groups: int = 1
    group_top: int = 1  # a group scores as the sum of so many of its best
    shared_width: int = 0  # channels of an MLP that every token is sent to as well
    router_bias: bool = False
    bias: bool = False
    clamped: bool = False  # the gate's activation is gpt-oss', in place of the model's
    dense_layers: tuple[int, ...] = ()  # that have the plain MLP instead

    def __post_init__(self) -> None:
        assert self.router in ROUTERS, f"router {self.router!r} is none of {', '.join(ROUTERS)}"

    @property
    def channels(self) -> int:
        """Of all of them, the MLP of every token among them."""
        return self.number * self.width + self.shared_width

    def expected_distinct(self, tokens: float) -> float:
        """Experts that `tokens` tokens are sent to, where each is as likely as any other."""
        return self.number * (1.0 - (1.0 - self.per_token / self.number) ** tokens)

    def layer_kinds(self, layers: range) -> tuple[tuple[int, int], ...]:
        """(a layer of the kind, how many there are) of the dense and of the sparse layers among `layers`."""
        dense = [layer for layer in layers if layer in self.dense_layers]
        sparse = [layer for layer in layers if layer not in self.dense_layers]
        return tuple((kind[0], len(kind)) for kind in (dense, sparse) if kind)

    def held(self, tp: int) -> int:
        """Of one of `tp` shards."""
        return experts_held(self.number, tp)


def experts_held(number: int, tp: int) -> int:
    """Experts of one of `tp` shards; behind the last there may be some that no token is sent to."""
    return -(-number // tp)
