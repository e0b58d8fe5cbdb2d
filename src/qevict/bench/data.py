"""Where benchmark data lies, and how it is read. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "QEVICT_DATA"


class DataNotFoundError(ValueError):
    """A benchmark's file is not there; the message says which, and where to get it."""


def data_folder(given: Path | None) -> Path | None:
    """The data folder: the one given, or else the one that the environment variable QEVICT_DATA names."""
    folder = given or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if folder is not None and not folder.is_dir():
        raise DataNotFoundError(f"The data folder {str(folder)!r} does not exist or is no folder.")
    return folder


def find_file(folder: Path | None, patterns: tuple[str, ...], source: str) -> Path:
    """The first file in the folder that matches one of the patterns, earlier patterns first.

    `source` says what the file is and where to get it, for the error where there is none.
    """
    wanted = " or ".join(patterns)
    if folder is None:
        raise DataNotFoundError(f"Needs {wanted}, but no data folder was given (nor {VARIABLE} set). {source}")
    for pattern in patterns:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return found[0]
    raise DataNotFoundError(f"There is no {wanted} in {folder}. {source}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file (`.jsonl`), or of a JSON file that holds a list of them or just one."""
    if path.suffix != ".jsonl":
        content = _parse(path.read_text(encoding="utf-8"), str(path))
        return content if isinstance(content, list) else [content]
    with path.open(encoding="utf-8") as file:
        return [_parse(line, f"line {number} of {path}") for number, line in enumerate(file, 1) if line.strip()]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
