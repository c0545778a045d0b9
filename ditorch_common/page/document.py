"""The HTML text around the data: modules joined into one script, styles, and a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import html as escaping
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
FIRST: Final = "main.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let)\b)", re.MULTILINE)
_DATA = re.compile(r'<script type="([a-z/-]+)" id="([^"]*)">(.*?)</script>', re.DOTALL)
_LANGUAGE = re.compile(r"[A-Za-z-]{1,20}")


def module_order(first: str = FIRST) -> list[str]:
    """The modules that one needs, each after those that it imports."""
    order: list[str] = []
    waiting: set[str] = set()

    def visit(name: str) -> None:
        if name in order or name in waiting:
            return
        waiting.add(name)
        for needed in _IMPORT.findall((FOLDER / "js" / name).read_text(encoding="utf-8")):
            visit(needed)
        order.append(name)

    visit(first)
    return order


@lru_cache(maxsize=1)
def script() -> str:
    """All modules as one: they share one scope, so no two may declare the same name."""
    parts = []
    for name in module_order():
        text = (FOLDER / "js" / name).read_text(encoding="utf-8")
        parts.append(f"// {name}\n" + _EXPORT.sub("", _IMPORT.sub("", text)))
    return _inline('"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n")


@lru_cache(maxsize=1)
def charts() -> str:
    """uPlot, as its makers publish it."""
    return _inline((FOLDER / "uplot" / "uPlot.iife.min.js").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def styles() -> str:
    """The styles of uPlot and of the page."""
    files = (FOLDER / "uplot" / "uPlot.min.css", FOLDER / "page.css")
    return _inline("\n".join(file.read_text(encoding="utf-8") for file in files))


def _inline(text: str) -> str:
    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ValueError("a file of the page has a text that would end its element")
    return text


def policy(live: bool) -> str:
    """What the browser allows the page: its own scripts and styles, by hash, and in live mode its own server."""

    def sums(*texts: str) -> str:
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    rules = [
        "default-src 'none'",
        f"script-src {sums(charts(), script())}",
        f"style-src {sums(styles())}",
        f"connect-src {chr(39)}self{chr(39)}" if live else "connect-src 'none'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    ]
    return "; ".join(rules)


def json_text(value: Any) -> str:
    """JSON that can stand in a script element: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode("utf-8", "replace").decode()  # lone surrogates, which some file names have


def data(kind: str, name: str, content: str) -> str:
    """An element that holds data, which no browser runs."""
    if "<" in content:
        raise ValueError(f"{name} has a '<' that is not written as data")
    return f'<script type="{kind}" id="{escaping.escape(name)}">{content}</script>'


def data_in(text: str) -> Iterator[tuple[str, str, str]]:
    """Type, name and content of the data in a page."""
    for found in _DATA.finditer(text):
        yield found[1], escaping.unescape(found[2]), found[3]


def html(title: str, language: str, data: Sequence[str], live: bool = False) -> str:
    """The whole document."""
    if not _LANGUAGE.fullmatch(language):
        raise ValueError(f"{language!r} is no language")
    title = escaping.escape(title.encode("utf-8", "replace").decode())
    lines = [
        "<!doctype html>",
        f'<html lang="{language}">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escaping.escape(policy(live))}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title>",
        f"<style>{styles()}</style>",
        "</head>",
        "<body>",
        "<noscript>This page shows its data with JavaScript, which is in the file. 请启用 JavaScript。</noscript>",
        '<div id="page"></div>',
        *data,
        f"<script>{charts()}</script>",
        f"<script>{script()}</script>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(lines)
