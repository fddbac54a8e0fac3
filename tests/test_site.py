"""The site of docs/ builds without a word, and is whole: pages, links, the API, and nothing that comes from elsewhere."""

import html
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import typing
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import lightning_pgroup
from tests.scripts import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def in_nav(entry):
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for one in entries for page in in_nav(one)]


def test_each_page_is_in_the_navigation():
    assert sorted(in_nav(CONFIG["nav"])) == PAGES


class Page(HTMLParser):
    """The anchors, links and loaded files of a page, and its words."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded, self.words = set(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.update(value for value in (given.get("id"), given.get("name")) if value)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev") and given.get("href"):
            self.loaded.append(given["href"])

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    pytest.importorskip("material", reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
        "--site-dir",
        str(folder),
    ]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=folder, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said = [
        line for line in (done.stdout + done.stderr).splitlines() if not re.match(r"INFO +- +(Cleaning|Building|Docum)", line)
    ]
    assert said == [], "mkdocs has something to say"
    return folder


@pytest.fixture(scope="module")
def built(site):
    return {path.name: Page(path.read_text()) for path in site.glob("*.html")}


def test_each_page_is_built(built):
    assert set(built) == {page.replace(".md", ".html") for page in PAGES} | {"404.html"}


def test_links_and_anchors_lead_somewhere(site, built):
    checked = 0
    for name, page in built.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or name == "404.html":
                continue
            path = unquote(target.path) or name
            assert (site / path).exists(), (name, link)
            if target.fragment:
                checked += 1
                assert unquote(target.fragment) in built[path].anchors, (name, link)
    assert checked > 200


def test_links_out_of_the_pages_become_paths():
    named = runpy.run_path(str(ROOT / "mkdocs_links.py"))["on_page_markdown"]
    assert named("see [examples/hydra](../examples/hydra), [README](../README.md#when)") == "see `examples/hydra`, `README.md`"
    assert named("[a study](../examples/study.py) [API](api.md)") == "a study (`examples/study.py`) [API](api.md)"


def test_nothing_is_fetched_from_elsewhere(site, built):
    for name, page in built.items():
        assert [one for one in page.loaded if urlsplit(one).scheme or one.startswith("//")] == [], name
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style


def test_each_public_name_is_explained(built):
    api = built["api.html"]
    for name in lightning_pgroup.__all__:
        assert f"lightning_pgroup.{name}" in api.anchors, name
    assert not re.search(r":(class|meth|func|mod|attr|data|exc):", api.text)


def test_signatures_arguments_and_errors_are_shown(built):
    """What the code has, the page has: each argument with its default, and each error of a docstring."""
    api = built["api.html"].text
    strategy = lightning_pgroup.PGroupDDPStrategy
    functions = [strategy.__init__, strategy.group, strategy.new_group, strategy.destroy_group, strategy.close]
    functions += [lightning_pgroup.destroy_process_group, lightning_pgroup.process_group]
    for function in functions:
        for name, parameter in inspect.signature(function).parameters.items():
            if name == "self":
                continue
            assert re.search(rf"\b{name}\b", api), name
            if parameter.default is not inspect.Parameter.empty and isinstance(parameter.default, str | float):
                assert re.search(rf"{name} : .{{1,120}}? = {parameter.default!r}".replace("'", "[\"']"), api), name
    raised = set(
        re.findall(r"^ +(\w+Error): ", "\n".join(inspect.getdoc(one) or "" for one in [strategy, *functions]), re.MULTILINE)
    )
    assert len(raised) > 4
    assert all(name in api for name in raised)
    for policy in typing.get_args(lightning_pgroup.policy.PolicyName):
        assert policy in api


def test_the_search_finds_what_people_look_for(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    for words, page in [
        ("default process group twice", "faq.html"),
        ("destroy_timeout", "api.html"),
        ("foreign", "policies.html"),
    ]:
        found = {one["location"].split("#")[0] for one in index["docs"] if words in html.unescape(one["title"] + one["text"])}
        assert page in found, words
