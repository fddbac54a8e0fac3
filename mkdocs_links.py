"""A hook of MkDocs: a link out of ``docs/`` is for those who read the repository; the site names its path instead."""

import re

_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the path where such a link stands. Called by MkDocs for each page."""
    return _OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link["text"].strip("`"), link["path"]
    return f"`{path}`" if text in (path, path.removesuffix(".md")) else f"{text} (`{path}`)"
