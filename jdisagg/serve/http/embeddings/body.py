"""What `POST /v1/embeddings` and `POST /v1/score` take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from jdisagg.core.request import MAX_PRIORITY
from jdisagg.serve.http.schema import INT32, Count, Texts, TokenIds


class PoolingFields(BaseModel):
    """What both share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    pooling: Literal["last", "mean"] | None = None  # null: as --embeddings says
    truncate_prompt_tokens: Count | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    request_id: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    user: str | None = None


class EmbeddingsBody(PoolingFields, BaseModel):
    """`POST /v1/embeddings`."""

    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32)] | None = None
    normalize: bool = True


class ScoreBody(PoolingFields, BaseModel):
    """`POST /v1/score`: one text against each of the others, or pairs of two lists."""

    text_1: str | Texts
    text_2: str | Texts
