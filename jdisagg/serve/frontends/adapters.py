"""The adapters that clients may ask for by name: those of --lora, and what an operator loads and unloads meanwhile.

What is here are names. A request carries its adapter with it, so that whoever computes it reads the files when they are
first asked for; one that runs while its adapter is unloaded ends with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jdisagg.core.errors import CheckpointError, ConfigError, RequestError
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.request import NAME, Adapter, adapter_sizes, named_folders
from jdisagg.core.settings import Settings
from jdisagg.model.lora import identified, read_adapter


class NoSuchAdapter(RequestError):
    """Nothing of this name was loaded (HTTP 404)."""


class ModelNotFound(RequestError):
    """The client asked for a model that is not served here (HTTP 404)."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """By name, in the order of their loading; what is not enabled has none."""

    model: ModelConfig | None = None  # None: not enabled
    max_rank: int = 0
    taken: tuple[str, ...] = ()  # names of the model itself
    found: dict[str, Adapter] = field(default_factory=dict[str, Adapter])

    def find(self, name: str | None) -> Adapter | None:
        return None if name is None else self.found.get(name)

    def load(self, name: str, folder: str, *, in_place: bool = False) -> Adapter:
        """Reads and checks it. Raises RequestError; `in_place`: another of this name gives way to it."""
        if self.model is None:
            raise RequestError("adapters are not enabled: start the server with --enable_lora or --lora", "lora_name")
        if NAME.fullmatch(name) is None:
            raise RequestError(f"lora_name is {name[:200]!r}, must be up to 128 letters, digits and ._/:-", "lora_name")
        if name in self.taken or (name in self.found and not in_place):
            what = "the model itself" if name in self.taken else f"loaded already, from {self.found[name].folder}"
            raise RequestError(f"lora_name is {name!r}, which is {what}", param="lora_name")
        try:
            adapter = identified(name, folder)
            read_adapter(adapter, self.model, self.max_rank)
        except CheckpointError as error:
            raise RequestError(str(error), param="lora_path") from error
        self.found[name] = adapter
        return adapter

    def unload(self, name: str) -> Adapter:
        """Requests that run go on with it. Raises NoSuchAdapter."""
        adapter = self.found.pop(name, None)
        if adapter is None:
            known = ", ".join(self.found) or "none"
            raise NoSuchAdapter(f"no adapter {name[:200]!r} is loaded; there are: {known}", param="lora_name")
        return adapter


def adapters_of(settings: Settings, model: ModelConfig, model_name: str) -> Adapters:
    """Those of --lora. Raises ConfigError."""
    folders = named_folders(settings.lora)
    if not adapter_sizes(settings):
        return Adapters()
    found = Adapters(model, settings.max_lora_rank, (model_name,))
    for name, folder in folders.items():
        try:
            found.load(name, folder)
        except RequestError as error:
            raise ConfigError(f"--lora={name}={folder}: {error}") from error
    return found
