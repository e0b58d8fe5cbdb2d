"""A GGUF file of a small Llama-like model -> a folder that Transformers loads in a second.

Two steps, both done once: `convert_gguf` writes the folder, `build_once` makes sure that nobody ever sees half of one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return folder `target`, made by `build(empty_folder)` if it does not exist yet.

    The work happens in a sibling folder that is renamed when it is complete: a process that is killed leaves nothing
    that looks finished, and of several processes at once one builds while the others wait for it.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock")):
        if not target.is_dir():
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # a killed predecessor's: whoever holds the lock is alone
            partial.mkdir()
            build(partial)
            partial.rename(target)
    return target


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model of `gguf_file` (weights dequantised to float32), its tokenizer and chat template into `folder`.

    Raises ValueError for a file whose tokenizer is not SmolLM's byte-level BPE.
    """
    gguf_tokenizer(gguf_file).save_pretrained(folder)
    _dequantized_model(gguf_file).save_pretrained(folder)


def gguf_tokenizer(gguf_file: Path) -> Any:
    """The tokenizer of `gguf_file`, built from the file's own vocabulary, merges and special tokens.

    Transformers' loader guesses the kind from the architecture: its 5.2 release takes this one for a CodeLlama
    tokenizer with a wrong end of text, and later ones leave out that SmolLM splits numbers into digits first.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf_file).fields

    def read(key: str) -> Any:
        return fields[key].contents()

    family = (read("tokenizer.ggml.model"), read("tokenizer.ggml.pre"))
    if family != ("gpt2", "smollm"):
        raise ValueError(f"{gguf_file} has a tokenizer of kind {family}; only ('gpt2', 'smollm') can be converted.")

    tokens = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, read("tokenizer.ggml.token_type"), strict=True)
        if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens(special)

    def named(name: str) -> str:
        return str(tokens[read(f"tokenizer.ggml.{name}_token_id")])

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=read("tokenizer.chat_template"),
        model_max_length=read(f"{read('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _dequantized_model(gguf_file: Path) -> Any:
    """The plain float32 model of `gguf_file`, as if it had never been quantised."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer releases may keep the weights packed unless they are told not to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, **options)

    # A model that came from a GGUF file refuses to be saved; a fresh one with the same weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model
