"""Tokenizers of GGUF files: transformers builds them; what differs from the file is mended here."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from kvmosaic.kept import keep, kept_folder
from kvmosaic.model.formats.gguf.file import GgufFile

logger = logging.getLogger("kvmosaic")

_GPT2_SPLITS = {"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"}
"""GPT-2 text splits."""
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Splits that take digits of any script one by one, and then split as GPT-2; transformers leaves out the digits."""
_SPLITS_WITH_BEGIN = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
"""Splits for which llama.cpp adds the BOS token unless the file says no; transformers adds it if the file says yes."""
_KIND, _SPLIT, _TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"
_BLANK = "\u2581"
_CLASSES = {"llama": "TokenizersBackend"}
"""What `AutoTokenizer` takes for an architecture of ggml, where it is known: it reads the whole file to find out."""
_KEPT = 1
"""Number of what this module makes of a file: another one where that changes."""


def has_tokenizer(file: GgufFile) -> bool:
    """Whether the file has a vocabulary."""
    return bool(file.metadata.get(_TOKENS))


def read_file_tokenizer(file: GgufFile, folder: str, options: Mapping[str, Any]) -> Any:
    """The tokenizer of a file in a folder of its own (`weights.alone`); None if it has none.

    transformers takes seconds to build it, so it is kept, unless what is read back differs in anything.
    """
    if not has_tokenizer(file):
        return None
    with file.path.open("rb") as opened:
        header = opened.read(file.data_start)
    made_by = " ".join([str(_KEPT), *map(version, ("kvmosaic", "transformers", "tokenizers"))])
    kept = kept_folder("tokenizers", header, made_by.encode())
    if kept is not None and kept.is_dir():
        with suppress(Exception):  # a damaged one is built again
            return _read_back(kept)
    tokenizer = _built(file, folder, options)

    def write(draft: Path) -> None:
        tokenizer.save_pretrained(draft)
        if _facts(_read_back(draft)) != _facts(tokenizer):
            raise ValueError("it is read back as another one")

    keep(kept, write)
    return tokenizer


def _read_back(folder: Path) -> Any:
    name = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
    return _class_named(name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _class_named(name: str) -> Any:
    """A class of tokenizers; `AutoTokenizer` would look for a model's configuration, and import torch."""
    return getattr(import_module("transformers"), name)


def _facts(tokenizer: Any) -> tuple[Any, ...]:
    """What texts become, and what is read of a tokenizer."""
    return (
        type(tokenizer),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.all_special_ids,
        tokenizer.special_tokens_map,
        tokenizer.added_tokens_decoder,
        tokenizer.clean_up_tokenization_spaces,
        tokenizer.model_max_length,
    )


def _built(file: GgufFile, folder: str, options: Mapping[str, Any]) -> Any:
    split = file.metadata.get(_SPLIT, "default")
    adds_begin = split in _SPLITS_WITH_BEGIN and "tokenizer.ggml.add_bos_token" not in file.metadata
    options = {**options, **({"add_bos_token": True} if adds_begin else {})}
    tokenizer = None
    with suppress(Exception):  # another version of transformers; or the same error comes again
        tokenizer = _class_named(_CLASSES[file.architecture]).from_pretrained(folder, **options)
    if tokenizer is None:
        from kvmosaic.model.transformers_loading import read_tokenizer

        tokenizer = read_tokenizer(str(file.path), folder, options)
    backend = tokenizer.backend_tokenizer
    if file.metadata.get(_KIND) == "llama":
        _write_spaces(backend, has_prefix=bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True)))
    elif split in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    return _without_foreign_tokens(tokenizer, int(file.metadata[_TOKENS]))


def warn_of_split(file: GgufFile) -> None:
    """Warns if transformers does not know how the text of a file is split."""
    split = file.metadata.get(_SPLIT, "default")
    if file.metadata.get(_KIND) == "gpt2" and split not in _known_splits():
        logger.warning(
            "%s splits text by rules called %r, which transformers does not know: it is split as GPT-2 does, and may "
            "become other tokens than the model learned from",
            file.path.name,
            str(split)[:60],
        )


def _write_spaces(backend: Any, *, has_prefix: bool) -> None:
    """Writes blanks as SentencePiece does, with one more before a text and after control tokens if the file says so.

    transformers adds it to a text only, whatever the file says, and not before a blank.
    """
    blanks = normalizers.Replace(" ", _BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if has_prefix else blanks
    backend.pre_tokenizer = None
    if not has_prefix:
        parts = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(parts)


def _without_foreign_tokens(tokenizer: Any, num_tokens: int) -> Any:
    """A tokenizer without the tokens that transformers adds after those of the file, such as `<|endoftext|>`.

    The model has no rows for them: a prompt with such a text could not be answered.
    """
    if all(token < num_tokens for token in tokenizer.added_tokens_decoder):
        return tokenizer
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < num_tokens]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer


def _known_splits() -> set[str]:
    known = _GPT2_SPLITS | _DIGITS_APART
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return known
    return known | set(GGUF_PRE_TOKENIZER_SPLITS)
