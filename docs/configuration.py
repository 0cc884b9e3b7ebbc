"""`configuration.md`: every setting of both servers, read off their own declarations.

python -m docs.configuration           # write it
python -m docs.configuration --check   # status 1 when the file says something else
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ivy_gateway import config as gateway
from tulip_server import config as server

PAGE = Path(__file__).resolve().parent / "configuration.md"
INTRODUCTION = """# Configuration

Written by `python -m docs.configuration` from the servers' own declarations.

Each setting is a flag and an environment variable; the flag wins. A variable that is set but empty counts as
absent, so that templates can leave it blank. An unknown flag or variable with the prefix stops the server at
start. `ivy up MODEL` takes the gateway's flags and passes some to the servers: see `ivy up --help`.

Repeatable settings: separated by commas in the environment; on the command line the flag is repeated.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table."""

    flag: str
    variable: str
    default: str
    meaning: str

    @property
    def row(self) -> str:
        """In Markdown."""
        cells = (f"`{self.flag}`", f"`{self.variable}`", self.default, self.meaning)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def gateway_entries() -> Iterator[Entry]:
    """The gateway's, in the order of its declarations."""
    for field in dataclasses.fields(gateway.GatewayConfig):
        setting = gateway._SETTINGS[field.name]
        yield Entry(setting.flag, setting.key, _gateway_default(field, setting), setting.help)


def server_groups() -> Iterator[tuple[str, list[Entry]]]:
    """The server's, by the groups of its `--help`. Its help texts end with the default in brackets."""
    for group in server._parser()._action_groups:
        entries = [_server_entry(action) for action in group._group_actions if action.dest != "help"]
        if entries and group.title:
            yield group.title, entries


def _gateway_default(field: dataclasses.Field[object], setting: gateway._Setting) -> str:
    if setting.parse is gateway._boolean:
        return "on" if field.default != setting.inverted else "off"
    if field.default is not dataclasses.MISSING:
        return _shown(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else ""


def _server_entry(action: argparse.Action) -> Entry:
    meaning = (action.help or "") % {}
    default = "required" if action.required else "off" if action.nargs == 0 else ""
    if match := re.fullmatch(r"(.*) \(([^()]*)\)", meaning, re.DOTALL):
        meaning, default = match[1], match[2]
    flag = action.option_strings[0]
    return Entry(flag, "TULIP_" + flag.strip("-").replace("-", "_").upper(), default, meaning)


def _shown(default: object) -> str:
    if default in (None, ()):
        return ""
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def page() -> str:
    """The whole document."""
    tables = [f"## Gateway\n\n`python -m ivy_gateway`\n\n{_table(list(gateway_entries()))}"]
    tables += ["## Server\n\n`python -m tulip_server`\n"]
    tables += [
        f"### {title[0].upper()}{title[1:]}\n\n{_table(entries)}" for title, entries in server_groups()
    ]
    return "\n".join([INTRODUCTION, *tables])


def _table(entries: list[Entry]) -> str:
    header = ("flag", "variable", "default", "meaning")
    lines = [f"| {' | '.join(header)} |", "| --- | --- | --- | --- |", *(entry.row for entry in entries)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the reference of all settings.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when it is stale")
    check = parser.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is stale: run python -m docs.configuration")


if __name__ == "__main__":
    main()
