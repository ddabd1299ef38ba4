"""A served model that thinks and calls tools, its words written by each test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.frontends.tools.asked import Parsers
from tests.hostile.model_folders import copy
from tests.serve.live_http import Front, serving
from tests.serve.scripted import ScriptedService, tokens

TEMPLATE = """{% if tools %}{{ tools | tojson }}
<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}\
{{ call.function.name }}={{ call.function.arguments.city }}{% endfor %}
{% endfor %}<think>
"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
ANSWER = (
    "Hm, weather.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
)


@contextmanager
def tools_front(folder: Path) -> Iterator[Front]:
    """`folder` is made: the model's files."""
    (copy(folder) / "chat_template.jinja").write_text(TEMPLATE)
    service = ScriptedService(max_model_len=4096)
    service.tokenizer = Tokenizer(folder)
    settings = FrontSettings(parsers=Parsers("hermes", "think"))
    with serving(create_app(service, settings)) as url:
        yield Front(service, url)


def says(served: Front, text: str) -> None:
    """Makes every answer `text`."""
    served.service.script = lambda request: tokens(request, served.service.tokenizer.encode(text, False))


def prompt_of(served: Front) -> str:
    """The last that was asked, as the model reads it."""
    return served.service.tokenizer.decode(served.service.seen[-1].prompt, skip_special_tokens=False)
