"""Where benchmark data lies, and how it is read: from a folder, or from the Hugging Face Hub where it is there."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

VARIABLE = "QEVICT_DATA"
_HUB_TIMEOUT = 5.0  # seconds


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
        return _parse_lines(file, str(path))


def hub_rows(repository: str, archive: str, member: str) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file in a zip archive of a data set on the Hub, or in the Hub's local cache.

    Raises:
        DataNotFoundError: neither has it.
    """
    try:
        path = hf_hub_download(repository, archive, repo_type="dataset", local_files_only=True)
    except LocalEntryNotFoundError:
        try:  # asked once, since a download is tried again and again where there is no network
            HfApi().dataset_info(repository, timeout=_HUB_TIMEOUT)
            path = hf_hub_download(repository, archive, repo_type="dataset")
        except Exception as error:  # whatever the HTTP library of the day raises when it cannot connect
            raise DataNotFoundError(
                f"No data folder was given (nor {VARIABLE} set), {archive} of "
                f"https://huggingface.co/datasets/{repository} is not in the Hub's local cache, and the Hub did not "
                f"give it ({type(error).__name__}). Get it elsewhere, and give the folder that it is unpacked in."
            ) from error
    try:
        text = zipfile.ZipFile(path).read(member).decode("utf-8")
    except KeyError:
        raise DataNotFoundError(f"There is no {member} in {archive} of {repository}.") from None
    return _parse_lines(text.split("\n"), member)


def _parse_lines(lines: Iterable[str], where: str) -> list[dict[str, Any]]:
    return [_parse(line, f"line {number} of {where}") for number, line in enumerate(lines, 1) if line.strip()]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
