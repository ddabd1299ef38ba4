"""What the matrices of a run are to hold, decided when they are loaded: asked for, or measured where that is "auto"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

from jdisagg.core.kv_layout import DTYPE_BYTES
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.settings import Settings
from jdisagg.core.weight_format import AS_ACTIVATIONS, SCALED, WeightFormat
from jdisagg.model.calibration import TEXT, Loss, measure_loss
from jdisagg.model.checkpoint import size_text
from jdisagg.model.product_times import ProductTimes, time_products
from jdisagg.model.sources import Source
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deployment import AUTO, STORED, Deployment
from jdisagg.serve.remembered_weights import Choice, ChoiceMemory

LARGEST_KL = 1e-3  # nats a token that "auto" may lose
GAIN = 0.85  # of f32's time that a coarser dtype may take to be worth it: far beyond what timings differ by
CANDIDATES = ("bfloat16", "int8")
CHUNK = 128  # rows of a prefill chunk that is timed
CALIBRATION_TOKENS = 96


def choose_weights(
    deployment: Deployment, settings: Settings, source: Source, told: Callable[[str], None], folder: Path | None
) -> WeightFormat:
    """`told` is called with one line where anything was decided, and whether it was measured now or before.

    What was measured is remembered in `folder`, where there is one: a second start is served with the same weights.
    """
    asked = deployment.weight_dtype
    if asked in SCALED and settings.weight_dtype in (AUTO, STORED):
        weights = deployment.weights
        told(f"{weights}, as the checkpoint stores them{kept_experts(deployment.model, weights, deployment.dtype)}")
        return weights
    if asked != AUTO and asked not in SCALED:
        return WeightFormat(asked)
    memory = ChoiceMemory.of(deployment, settings, folder)
    choice, when = memory.find(), "measured"
    if choice is None:
        choice = Choice(*_measured(deployment, settings, source), date.today().isoformat())
        memory.keep(choice)
    else:
        when = f"remembered from {choice.date}"
    weights = choice.weights
    told(f"{choice.why}; {when}{kept_experts(deployment.model, weights, deployment.dtype)}")
    return weights


def _measured(deployment: Deployment, settings: Settings, source: Source) -> tuple[WeightFormat, str]:
    """What is served, and why in one line."""
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    tokens = tokenizer.encode(TEXT)[:CALIBRATION_TOKENS]

    def loss_of(dtype: str) -> Loss:
        return measure_loss(source, deployment.model, dtype, tokens)

    if deployment.weight_dtype != AUTO:
        return _asked(loss_of(deployment.weight_dtype))
    rows = (deployment.sizes.max_num_seqs, CHUNK)
    times = {each: time_products(deployment.model, each, rows) for each in (AS_ACTIVATIONS, *CANDIDATES)}
    return chosen(deployment.dtype, times, loss_of)


def kept_experts(model: ModelConfig, weights: WeightFormat, dtype: str) -> str:
    """What stays full of a model with experts where its matrices are scaled, the words that end the line about them."""
    if not weights.is_scaled or model.experts is None:
        return ""
    held = size_text(model.expert_params * DTYPE_BYTES[dtype])
    share = model.expert_params / model.num_params()
    return f"; experts stay {dtype}: {held}, {share:.0%} of all weights, in each worker"


def _asked(loss: Loss) -> tuple[WeightFormat, str]:
    kept = f"; full stay {', '.join(sorted(loss.weights.full))}" if loss.weights.full else ""
    return loss.weights, f"{loss.weights.dtype}: {described(loss)}{kept}"


def described(loss: Loss) -> str:
    """What it costs, in the words of every line that says so."""
    return f"KL {loss.kl:.2g} nats a token, {loss.agreement:.0%} of greedy tokens as the full model's"


def chosen(full: str, times: Mapping[str, ProductTimes], loss_of: Callable[[str], Loss]) -> tuple[WeightFormat, str]:
    """The fastest dtype that is clearly faster than the `full` one and loses little, else that, and why in one line."""
    most_s = GAIN * times[AS_ACTIVATIONS].total_s
    faster = sorted((each for each in times if times[each].total_s <= most_s), key=lambda each: times[each].total_s)
    said = ", ".join(f"{full if dtype == AS_ACTIVATIONS else dtype} {time.text}" for dtype, time in times.items())
    for dtype in faster:
        loss = loss_of(dtype)
        said += f"; {dtype}: {described(loss)}"
        if loss.kl < LARGEST_KL:
            return loss.weights, f"auto: {dtype} (processor time of a layer's products: {said})"
    return WeightFormat(), f"auto: {full} (processor time of a layer's products: {said})"
