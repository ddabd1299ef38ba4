"""The `--speculative` flag: the source of draft tokens, their number, and when they are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jdisagg.core.default_sizes import Devices, sheet_of
from jdisagg.core.errors import CheckpointError, FlagError
from jdisagg.core.layout.kv_layout import DraftPages, KVLayout
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Speculation
from jdisagg.model.checkpoint import read_sharing_vocabulary
from jdisagg.model.draft_head import HeadConfig, read_head
from jdisagg.policy.speculation import DraftKVCost, draft_kv_cost

DRAFT_TOKENS = 3
OWN, OWN_HEAD = "draft", "eagle"  # subfolders of a model with its draft model and its head
KINDS = ("ngram", "auto", "grammar", OWN, OWN_HEAD)
HEADS = Path(__file__).parents[2] / "heads"  # heads by the beginning of their models' names

Draft = tuple[Path, ModelConfig | HeadConfig]


def read_speculation(flag: str) -> Speculation:
    """Parses --speculative: off, or KIND[:MODEL][:N]. Raises FlagError."""
    kind, *rest = flag.split(":")
    if flag == "off":
        return Speculation()
    number = rest.pop() if rest and rest[-1].isdecimal() else str(DRAFT_TOKENS)
    head = kind == OWN_HEAD or (kind == "auto" and rest[:1] == [OWN_HEAD])
    rest = rest[1:] if head and kind == "auto" else rest
    model = ":".join(rest) or (OWN_HEAD if head else OWN if kind == OWN else "")
    named = kind in (OWN, OWN_HEAD, "auto")
    if kind not in KINDS or int(number) == 0 or flag.endswith(":") or (model and not named):
        raise FlagError(
            f"--speculative={flag}: say off, {', '.join(KINDS)}, draft:MODEL, eagle:FOLDER, auto:MODEL,"
            f" auto:eagle:FOLDER, or one of them with :N for N tokens instead of {DRAFT_TOKENS}"
        )
    return Speculation(int(number), kind != "grammar", kind == "auto", model, head)


def read_draft(flag: str, model_folder: Path, model: ModelConfig) -> Draft | None:
    """Returns the folder and the config of the draft model or head; None without one.

    Raises FlagError, CheckpointError if the folder has no model, ConfigError if its vocabulary is not the model's.
    """
    speculation = read_speculation(flag)
    draft = speculation.draft
    if not draft:
        return None
    if speculation.head:
        folder = own_head(flag, model_folder) if draft == OWN_HEAD else Path(draft)
        return folder, read_head(folder, model, f"--speculative={flag}: {folder}")
    folder = model_folder / OWN if draft == OWN else Path(draft)
    return folder, read_sharing_vocabulary(folder, model.vocab_size, f"--speculative={flag}: {folder}")


def own_head(flag: str, model_folder: Path, heads: Path = HEADS) -> Path:
    """Returns the folder of the model's own head, else of one in the package. Raises CheckpointError."""
    folder, name = model_folder / OWN_HEAD, model_folder.name.lower()
    if folder.is_dir():
        return folder
    found = sorted(each for each in heads.glob("*") if each.is_dir() and name.startswith(each.name.lower()))
    if not found:
        raise CheckpointError(f"--speculative={flag}: no head in {folder} nor for {name} in {heads}: name a folder")
    return found[-1]


def kept_draft(
    draft: Draft | None, settings: Settings, mesh: MeshSpec, layouts: Sequence[KVLayout], name: str, devices: Devices
) -> DraftPages | None:
    """Returns the layout of a draft model's KV that is kept beside the model's; None if decode workers rebuild it.

    The model's pages have the first of `layouts`. `name` identifies the draft and its weights. Raises FlagError.
    """
    if draft is None or isinstance(draft[1], HeadConfig) or settings.draft_kv == "rebuild":
        return None
    kv, flags = layouts[0], f"--draft_kv={settings.draft_kv} and --speculative={settings.speculative}"
    pages = DraftPages(name, draft_layout(draft[1], kv), kv.num_layers)
    why = f"a ring guesses nothing (--mesh={mesh})" if mesh.is_ring else ""
    if any(each.scaled for each in layouts):
        why = f"a draft's pages are not kept beside quantised ones ({', '.join(each.dtype for each in layouts)})"
    if settings.draft_kv == "auto":
        return pages if not why and _kv_cost(draft[1], pages.layout, settings, devices).should_ship else None
    if why:
        raise FlagError(f"{flags}: {why}; say --draft_kv=rebuild")
    return pages


def _kv_cost(draft: ModelConfig, pages: KVLayout, settings: Settings, devices: Devices) -> DraftKVCost:
    chip = None if devices.platform == "cpu" else sheet_of(devices.platform, devices.chip)
    is_always_drafting = not read_speculation(settings.speculative).auto
    has_prefix_cache = settings.prefix_caching == "on"
    return draft_kv_cost(draft, pages, chip, has_prefix_cache=has_prefix_cache, is_always_drafting=is_always_drafting)


def draft_layout(draft: ModelConfig, kv: KVLayout) -> KVLayout:
    return KVLayout.of(draft, kv.page_size, kv.dtype, kv.tiled)


def with_head(kv: KVLayout, draft: Draft | None, settings: Settings, mesh: MeshSpec) -> KVLayout:
    """Returns the layout with a layer for the head's keys and values. Raises FlagError."""
    if draft is None or not isinstance(draft[1], HeadConfig):
        return kv
    check_head(settings, mesh)
    return replace(kv, num_layers=kv.num_layers + 1)


def check_head(settings: Settings, mesh: MeshSpec) -> None:
    """Raises FlagError if the mesh cannot run a head."""
    if mesh.is_ring:
        raise FlagError(
            f"--speculative={settings.speculative}: a ring runs no head; --mesh={mesh} may have stages in its place,"
            " or say ngram"
        )
