"""`salus config`: the settings in force, where each comes from, and how to change them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from salus.cli.console import make_console
from salus.config.file import Keys, as_text, parse_keys, remove_value, set_value
from salus.config.load import Found, Origin, Settings, load, setting_of
from salus.config.load import literal as as_literal
from salus.config.schema import SETTINGS, Setting
from salus.config.variables import VARIABLES, For, unknown_variables
from salus.errors import RequestRejected
from salus.paths import config_path, machine_config_path

app = typer.Typer(
    help="Show the settings in force and where each comes from; change them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

OfMachine = Annotated[
    bool, typer.Option("--system", help="Those of the machine-wide service, in /etc/salus/config.toml.")
]


def _complete_key(incomplete: str) -> list[tuple[str, str]]:
    return [(setting.key, setting.help) for setting in SETTINGS if setting.key.startswith(incomplete)]


Key = Annotated[str, typer.Argument(metavar="KEY", help="Its name, like service.policy.", autocompletion=_complete_key)]


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    system: OfMachine = False,
) -> None:
    """Show every setting in force, its value, and where the value comes from.

    Example: `salus config`

    Example: `salus config set service.policy srtf`
    """
    if context.invoked_subcommand is not None:
        if as_json or system:
            raise RequestRejected(f"--json and --system belong behind the command: salus config "
                                  f"{context.invoked_subcommand} --system")  # fmt: skip
        return
    settings = _load(system)
    if as_json:
        typer.echo(json.dumps(_as_json(settings)))
        return
    console = make_console()
    console.print(_settings_table(settings))
    console.print()
    console.print(_variables_table())
    console.print(
        "\nA setting has a variable too: SALUS_SERVICE_POLICY for service.policy. "
        "Later ones win: default, the machine's file, the user's file, variable, option.\n"
        f"machine's file: {_there(machine_config_path())}\nuser's file: {_there(config_path())}",
        highlight=False,
        soft_wrap=True,
    )


@app.command("set")
def set_(
    key: Key,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Its value, like srtf, 20ms, 16GiB or true.")],
    system: OfMachine = False,
) -> None:
    """Write a setting to your file, or to the machine's.

    Comments and everything else in the file stay. A service that runs already is not changed; `salus policy` changes
    the policy of that as well.

    Example: `salus config set service.quantum 50ms`
    """
    written = write(_known(key)[0], value, machine_wide=system)
    typer.echo(f"{key} = {value}, in {written.path}{written.but}")


@app.command()
def unset(key: Key, system: OfMachine = False) -> None:
    """Take a setting out of your file, or out of the machine's.

    Example: `salus config unset service.quantum`
    """
    keys = parse_keys(key)
    path = machine_config_path() if system else config_path()
    if not remove_value(path, keys):
        setting_of(keys)  # a name that does not exist is told from one that is not set
        raise RequestRejected(f"{path}: {key} is not set there; salus config shows where it comes from")
    typer.echo(f"{key} is no longer set in {path}")


@app.command()
def path(system: OfMachine = False) -> None:
    """Print which file is yours, or the machine's, whether it is there or not.

    Example: `$EDITOR $(salus config path)`
    """
    typer.echo(machine_config_path() if system else config_path())


@dataclass(frozen=True)
class Written:
    path: Path
    but: str
    """What keeps it from taking effect, as the end of a sentence; empty: nothing."""


def write(keys: Keys, value: str, *, machine_wide: bool) -> Written:
    """Puts one setting into a file, for services to come."""
    setting = setting_of(keys)
    try:
        text = as_literal(setting, value)
    except RequestRejected as error:
        raise RequestRejected(f"{as_text(keys)}: {error}") from None
    file = machine_config_path() if machine_wide else config_path()
    set_value(file, keys, text)
    overruled = not machine_wide and setting.variable in os.environ
    return Written(file, f"; but {setting.variable} is set, and wins" if overruled else "")


def _known(key: str) -> tuple[Keys, Setting[Any]]:
    keys = parse_keys(key)
    return keys, setting_of(keys)


def _load(system: bool) -> Settings:
    # The variables of this terminal are not those of the machine-wide service.
    return load(machine_wide=True, environment={}) if system else load()


def _settings_table(settings: Settings) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for found in settings.all():
        table.add_row(*map(Text, (found.key, _shown(found), str(found.source))))
    return table


def _shown(found: Found) -> str:
    if found.value is None:
        return f"({found.setting.if_unset})"
    return found.text or "(nobody)" if found.setting.key == "service.users" else found.text


def _variables_table() -> Table:
    """Those that users set, and whatever else is set."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("variable", "value", "what it is"):
        table.add_column(column, overflow="fold")
    for one in VARIABLES:
        if one.who is For.USERS or one.name in os.environ:
            table.add_row(*map(Text, (one.name, _value_of(one.name), one.help)))
    for name in unknown_variables(os.environ):
        table.add_row(*map(Text, (name, _value_of(name), "is nothing that Salus knows")))
    return table


def _value_of(name: str) -> str:
    # What proves that a process is the job's is nobody else's business, and a terminal may be seen.
    return "(secret)" if name == "SALUS_TOKEN" and name in os.environ else os.environ.get(name, "")


def _there(path: Path) -> str:
    return f"{path}" if path.exists() else f"{path} (there is none)"


def _as_json(settings: Settings) -> dict[str, Any]:
    return {
        "settings": [
            {
                "key": found.key,
                "value": None if found.value is None else found.text,
                "from": found.source.origin.name.lower(),
                "name": found.source.name or None,
                "line": found.source.line,
                "default": found.setting.default_for(settings.machine_wide),
                "variable": found.setting.variable if found.keys[0] != "limits" else None,
                "expected": found.setting.kind.expected,
                "help": found.setting.help,
            }
            for found in settings.all()
        ],
        "variables": [
            {"name": one.name, "value": _value_of(one.name) or None, "for": one.who.name.lower(), "help": one.help}
            for one in VARIABLES
        ],
        "unknown_variables": unknown_variables(os.environ),
        "files": {
            origin.name.lower(): str(path)
            for origin, path in ((Origin.MACHINE, machine_config_path()), (Origin.USER, config_path()))
        },
    }
