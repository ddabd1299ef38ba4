"""Location labels of a worker, and the kind of link between two workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType

from jdisagg.core.codec import TaggedStruct
from jdisagg.core.errors import ConfigError

LONGEST_LABEL = 128


class LinkClass(StrEnum):
    """The kinds of link that a transfer may cross, the nearest first."""

    PROCESS = "process"  # no link: both ends are in one process
    HOST = "host"
    RACK = "rack"  # hosts of one rack, or of one slice
    POD = "pod"
    BEYOND = "beyond"


class Labels(TaggedStruct, frozen=True):
    """The names of the locations that contain a worker, each inside the next; an empty one is unknown."""

    process: str = ""
    host: str = ""
    rack: str = ""
    slice: str = ""
    pod: str = ""

    @staticmethod
    def parse(text: str) -> Labels:
        """Parses "host=a,rack=b,slice=c,pod=d", any of them. Raises ConfigError."""
        given: dict[str, str] = {}
        for word in filter(None, text.replace(" ", "").split(",")):
            name, equals, value = word.partition("=")
            if name not in NAMES or not equals:
                raise ConfigError(f"--labels={text}: {word!r} is none of {', '.join(f'{each}=NAME' for each in NAMES)}")
            if name in given:
                raise ConfigError(f"--labels={text}: {name} is {given[name]!r} and {value!r}, can be one")
            given[name] = value
        labels = Labels(**given)
        labels.check("--labels")
        return labels

    def check(self, whose: str) -> None:
        """Raises ConfigError with the first invalid label and its value."""
        for name in NAMES:
            value: str = getattr(self, name)
            if len(value) > LONGEST_LABEL or not value.isprintable():
                raise ConfigError(f"{whose}: {name} is {value[:40]!r}, must be printable and at most {LONGEST_LABEL}")

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in NAMES if getattr(self, name))


NOWHERE = Labels()
NAMES = tuple(each.name for each in fields(Labels))
SHARED_BY: Mapping[LinkClass, tuple[str, ...]] = MappingProxyType(
    {
        LinkClass.PROCESS: ("process",),
        LinkClass.HOST: ("host",),
        LinkClass.RACK: ("rack", "slice"),
        LinkClass.POD: ("pod",),
    }
)


def link_class(one: Labels, other: Labels) -> LinkClass:
    """Returns the nearest location that is known to contain both workers."""
    for found, names in SHARED_BY.items():
        if any(getattr(one, name) and getattr(one, name) == getattr(other, name) for name in names):
            return found
    return LinkClass.BEYOND
