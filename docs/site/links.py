"""A hook of mkdocs: the site holds `docs/` alone, so a link to another file of the repository is its name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace such links. Raises `FileNotFoundError` for one to a file that does not exist."""
    return _OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, target = link.groups()
    if not (ROOT / target).exists():
        raise FileNotFoundError(f"a document links to {target}, which does not exist")
    return text if text.strip("`") == target else f"{text} (`{target}`)"
