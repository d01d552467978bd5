"""The dashboard's page and files: types, caching, addresses, and that nothing on the page is inline or foreign."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from springtide.service.api.dashboard import FIRST_COMMANDS, PAGES, dashboard_routes, render_page


@pytest.fixture
def browser() -> TestClient:
    return TestClient(FastAPI(routes=dashboard_routes()))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.text.append(data.strip())


def parse(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    return tags


def addresses(tags: Tags) -> list[str]:
    return [value for _, attrs in tags.tags for name, value in attrs.items() if name in ("src", "href") and value]


def test_page_is_html_that_browsers_revalidate(browser: TestClient) -> None:
    answer = browser.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_everything_the_page_names_is_served_with_its_type_and_kept_for_ever(browser: TestClient) -> None:
    named = addresses(parse(browser.get("/").text))
    assert len(named) >= 3
    types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
    for address in named:
        answer = browser.get(address)
        assert answer.status_code == 200, address
        assert answer.headers["content-type"] == types[address.rsplit(".", 1)[1]]
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_modules_import_only_modules_that_are_served(browser: TestClient) -> None:
    main = next(address for address in addresses(parse(browser.get("/").text)) if address.endswith(".js"))
    folder = main.rsplit("/", 1)[0]
    waiting, seen = ["main.js"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        answer = browser.get(f"{folder}/{name}")
        assert answer.status_code == 200, name
        waiting += [found for found in re.findall(r'from "\./([^"]+)"', answer.text) if found not in seen]
    assert seen == {path.name for path in (PAGES / "static").glob("*.js")}


@pytest.mark.parametrize(
    "path", ["/static/0000/main.js", "/static/{digest}/absent.js", "/static/{digest}/../dashboard.html"]
)
def test_other_addresses_are_not_found(browser: TestClient, path: str) -> None:
    digest = addresses(parse(browser.get("/").text))[0].split("/")[2]
    answer = browser.get(path.format(digest=digest))
    assert answer.status_code == 404
    assert "immutable" not in answer.headers.get("cache-control", "")


def test_nothing_on_the_page_is_inline_or_from_elsewhere() -> None:
    tags = parse(render_page("abc"))
    assert not any(tags.text), "no inline script or style"
    for tag, attrs in tags.tags:
        assert tag != "style"
        assert "style" not in attrs
        assert not [name for name in attrs if name.startswith("on")]
    assert all(address.startswith("/static/abc/") for address in addresses(tags))


def test_scripts_never_turn_text_into_markup() -> None:
    for path in (PAGES / "static").glob("*.js"):
        text = path.read_text()
        for banned in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://",
            "https://",
        ):
            found = text.replace('"http://www.w3.org/2000/svg"', "")
            assert banned not in found, f"{path.name} uses {banned}"


def test_values_are_escaped_and_the_empty_page_says_what_to_type() -> None:
    html = render_page('"><script>alert(1)</script>')
    assert "<script>alert(1)" not in html
    for command, _ in FIRST_COMMANDS:
        assert command in html
