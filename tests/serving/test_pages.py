"""The pages that the server sends: whole in themselves, and nothing that comes from the server becomes HTML."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from serving.status import PAGES, load_page

NAMES = ("status", "chat")
# Ways from text to HTML or code, and elements and attributes that fetch something.
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|createContextualFragment"
    r"|setHTML|srcdoc|\bimport\b|localStorage|sessionStorage|document\.cookie"
)
EXTERNAL = re.compile(
    r"https?:|wss?:|//[\w-]+\.\w|@import|url\(|\bsrc=|<link|<iframe|<img|<base|<object|<embed", re.IGNORECASE
)


def text_of(name):
    return load_page(name).body.decode("utf-8")


def test_these_are_all_the_pages():
    assert {path.name for path in PAGES.iterdir()} == {f"{name}.html" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_asks_nobody_else_for_anything(name):
    assert EXTERNAL.findall(text_of(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_turns_text_into_html_or_code(name):
    assert UNSAFE.findall(text_of(name)) == []


def test_the_searches_find_what_they_look_for():
    assert EXTERNAL.findall('<script src="x"> fetch("https://a.b") @import "//cdn.io"')
    assert UNSAFE.findall("a.innerHTML = b") and UNSAFE.findall("eval(x)")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_well_formed_and_has_no_handlers_in_attributes(name):
    class Parser(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.ids = [], []

        def handle_starttag(self, tag, attrs):
            assert not any(attribute.startswith("on") or attribute == "style" for attribute, _ in attrs), attrs
            self.ids += [value for attribute, value in attrs if attribute == "id"]
            if tag not in ("meta", "input"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Parser()
    parser.feed(text_of(name))
    assert parser.open == [] and len(set(parser.ids)) == len(parser.ids)
    asked_for = set(re.findall(r'(?:byId|pairs|bar|scale)\("(\w+)"', text_of(name)))
    assert asked_for and asked_for <= set(parser.ids)


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_allows_the_pages_own_script_and_style_alone(name):
    page = load_page(name)
    policy = dict(part.strip().split(" ", 1) for part in page.content_security_policy.split(";"))
    for tag in ("script", "style"):
        inside = page.body.split(f"<{tag}>".encode())[1].split(f"</{tag}>".encode())[0]
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
