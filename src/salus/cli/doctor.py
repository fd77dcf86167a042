"""`salus doctor`: what this machine can do, and what to do about what it cannot."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from salus.cli.console import make_console
from salus.doctor import Verdict, examine

MARKS = {Verdict.GOOD: "[green]✓[/]", Verdict.NOTE: "[yellow]![/]", Verdict.BAD: "[red]✗[/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list and nothing else.")] = False,
) -> None:
    """Check what this machine can do, and say what to do about what it cannot. Status 1 if jobs cannot be shared here.

    Example: `salus doctor`
    """
    findings = examine()
    if as_json:
        rows = [{"what": f.what, "verdict": f.verdict.value, "found": f.found, "advice": f.advice} for f in findings]
        typer.echo(json.dumps(rows))
    else:
        console = make_console()
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            console.print(f"{MARKS[finding.verdict]} [bold]{finding.what:<{width}}[/]  ", end="")
            console.print(finding.found, highlight=False, markup=False)
            if finding.advice:
                console.print(f"{'':{width}}    {finding.advice}", highlight=False, markup=False, style="dim")
    raise typer.Exit(1 if any(finding.verdict is Verdict.BAD for finding in findings) else 0)
