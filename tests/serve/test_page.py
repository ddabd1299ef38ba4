"""The page's files: open to all, whole, under headers that let nothing in, and of nothing but themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.admin import ASSETS, FIRST, FOLDER, PAGE_PATHS
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import serving
from tests.serve.scripted import ScriptedService

SCRIPTS = {name: asset.body.decode() for name, asset in ASSETS.items() if name.endswith(".js")}
STYLES = {name: asset.body.decode() for name, asset in ASSETS.items() if name.endswith(".css")}
HTML = ASSETS[FIRST].body.decode()
MAX_LINES = 400


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedService(), FrontSettings(api_key="k"))) as url:
        yield url


def test_the_page_is_served_without_the_key_and_the_api_is_not(url: str) -> None:
    assert "<title>jdisagg</title>" in httpx.get(url).text
    assert httpx.get(f"{url}/v1/models").status_code == 401
    for path in PAGE_PATHS:
        assert httpx.get(f"{url}{path}").status_code == httpx.head(f"{url}{path}").status_code == 200
    for path in ("/page/", "/page/none.js", "/page/index.html", "/page/..%2fpage.py", "/page.py"):
        assert httpx.get(f"{url}{path}").status_code in (401, 404)


def test_every_file_says_what_it_is_and_what_it_may_do(url: str) -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for path in PAGE_PATHS:
        headers = httpx.get(f"{url}{path}").headers
        ending = path.rpartition(".")[2] if path != "/" else "html"
        assert headers["content-type"].startswith(kinds[ending])
        rules = [each.split(maxsplit=1) for each in headers["content-security-policy"].split(";")]
        policy = {rule[0]: rule[1] for rule in rules}
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'" and "unsafe" not in str(policy)
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_a_file_that_has_not_changed_is_not_sent_again(url: str) -> None:
    first = httpx.get(url)
    again = httpx.get(url, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"") and again.headers["etag"] == first.headers["etag"]


def test_every_colour_is_said_once_for_light_and_dark() -> None:
    said = re.findall(r"^\s*(--[\w-]+):(.*);", STYLES["page.css"], re.MULTILINE)
    names = [name for name, _ in said]
    assert len(names) > 15 and len(names) == len(set(names))
    assert not [name for name, value in said if "#" in value and "light-dark(" not in value]


def test_the_page_asks_nobody_else_and_has_nothing_inline() -> None:
    for name, text in {**SCRIPTS, **STYLES, FIRST: HTML}.items():
        assert not re.findall(r"(?<!xmlns=\")https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text), name
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=|javascript:", HTML)
    for named in re.findall(r'(?:src|href)="(/[^"]*)"', HTML):
        assert named in PAGE_PATHS
    for name, text in SCRIPTS.items():
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert module in ASSETS, f"{name} imports {module}"


def test_no_script_makes_elements_out_of_strings() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc|setHTML"
    assert SCRIPTS and not [name for name, text in SCRIPTS.items() if re.search(sinks, text)]


def test_all_that_the_scripts_look_for_by_id_is_in_the_page() -> None:
    there = re.findall(r'\sid="([^"]+)"', HTML)
    assert len(there) == len(set(there))
    wanted = {name for text in SCRIPTS.values() for name in re.findall(r'byId\("([^"]+)"\)', text)}
    assert wanted and wanted <= set(there)
    assert set(re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', HTML)) <= set(there)


def test_the_files_are_few_and_short() -> None:
    assert sum(len(asset.body) for asset in ASSETS.values()) < 100_000
    assert all(len(asset.body.splitlines()) <= MAX_LINES for asset in ASSETS.values())
    assert {path.name for path in FOLDER.iterdir()} == set(ASSETS)
