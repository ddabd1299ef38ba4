"""What names an adapter, and what it keeps apart."""

from dataclasses import replace

import pytest

from jdisagg.core.codec import decode, encode
from jdisagg.core.errors import ConfigError, DecodeError, RequestError
from jdisagg.core.request import Adapter, Request, RequestId, SamplingParams, adapter_sizes, named_folders, salted
from jdisagg.core.settings import Settings

SQL, TALES = (Adapter(name, digit * 32, f"/adapters/{name}") for name, digit in (("sql", "1"), ("tales", "2")))


def request(adapter: Adapter | None = None, cache_salt: str = "") -> Request:
    return Request(RequestId("a"), (1, 2, 3), SamplingParams(adapter=adapter), cache_salt=cache_salt)


def test_salts_of_adapters_and_tenants_are_all_different() -> None:
    asked = [request(adapter, salt) for adapter in (None, SQL, TALES) for salt in ("", "tenant", SQL.digest)]
    assert len({each.salt for each in asked}) == len(asked)


def test_the_same_files_by_another_name_share_their_kv() -> None:
    assert salted("", replace(SQL, name="other", folder="/elsewhere")) == salted("", SQL)


def test_no_client_can_write_the_salt_of_an_adapter() -> None:
    with pytest.raises(RequestError, match="cache_salt begins with a NUL"):
        request(cache_salt=SQL.salt).check(10, 100)


def test_a_request_keeps_its_adapter_on_its_way() -> None:
    assert decode(encode(request(SQL))) == request(SQL)
    with pytest.raises(DecodeError, match=r"missing required field `digest` - at `\$.adapter`"):
        decode({"is": "SamplingParams", "adapter": {"is": "Adapter", "name": "sql", "folder": "/"}})


@pytest.mark.parametrize("wrong", [replace(SQL, name="a b"), replace(SQL, name=""), replace(SQL, digest="12"), "sql"])
def test_an_adapter_that_nothing_loaded_is_refused(wrong: object) -> None:
    asked = request(SQL)
    asked.check(10, 100)
    with pytest.raises(RequestError, match="must be one that was loaded"):
        replace(asked, sampling=replace(asked.sampling, adapter=wrong)).check(10, 100)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sql", "has 'sql', must be NAME=FOLDER"),
        ("sql=", "has 'sql=', must be NAME=FOLDER"),
        ("a b=/x", "names 'a b'"),
        ("=/x", "names ''"),
        ("sql=/x,sql=/y", "names 'sql' twice, for /x and /y"),
    ],
)
def test_a_flag_that_names_no_folders_is_told_with_what_it_has(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        named_folders(text)


def test_a_flag_names_folders_in_order() -> None:
    assert list(named_folders("sql=/x=y, org/tales:v2=rel,").items()) == [("sql", "/x=y"), ("org/tales:v2", "rel")]


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        (Settings(), None),
        (Settings(lora="a=/x,b=/y"), 2),
        (Settings(enable_lora=True), 4),
        (Settings(max_loras=3), 3),
        (Settings(lora="a=/x,b=/y", max_loras=1), 1),
    ],
)
def test_there_are_as_many_slots_as_are_asked_for_or_named(settings: Settings, slots: int | None) -> None:
    assert adapter_sizes(settings).get("max_loras") == slots
