"""Where commands print: results to `console`, everything else to `progress`, so that a result can be piped."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

console = Console()
progress = Console(stderr=True)


def fail(message: str) -> NoReturn:
    """One line, as it is (markup would swallow what stands in brackets), and exit code 2."""
    progress.print(Text("qevict: ", style="red").append(message, style="default"))
    raise typer.Exit(2)
