"""Loading from folders and names."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.families import build
from support.loaded import dense_layout, dense_logits, random_prompt
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from kvmosaic.model import LoadedModel, load_model, quiet_libraries


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build("qwen3", torch.bfloat16).save_pretrained(path)
    return path


def test_a_path_is_never_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"there is no folder '\./notes/model'"):
        load_model(Path("notes/model"))


def test_a_folder_loads_without_a_tokenizer(folder: Path) -> None:
    model = load_model(folder, device="cpu", dtype="float32")
    assert model.tokenizer is None
    assert model.dtype is torch.float32
    assert model.device == torch.device("cpu")
    assert model.vocab_size == 128
    assert model.max_positions == 4096
    assert model.max_forward_tokens is None
    assert model.eos_token_ids == (2,)
    assert model.is_movable
    assert model.bytes_per_token() == 2 * 2 * (16 + 16) * 4


def test_loading_shows_no_bar_of_transformers_and_leaves_those_of_downloads(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    quiet_libraries()
    load_model(folder)
    assert "Loading weights" not in capfd.readouterr().err and not are_progress_bars_disabled()


def test_a_folder_and_the_model_in_memory_agree(folder: Path) -> None:
    layout = dense_layout(random_prompt())
    loaded = load_model(str(folder), device="cpu", dtype="bfloat16")
    built = LoadedModel.from_module(build("qwen3", torch.bfloat16))
    assert loaded.fingerprint == built.fingerprint
    assert torch.equal(dense_logits(loaded, layout), dense_logits(built, layout))


def test_sixteen_bit_weights_keep_fine_frequencies(folder: Path) -> None:
    model = load_model(folder, device="cpu", dtype="bfloat16")
    assert model.module.model.rotary_emb.inv_freq.dtype is torch.float32
    assert model.layers == load_model(folder, device="cpu", dtype="float32").layers


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_takes_sixteen_bits_only_where_the_cpu_has_them(folder: Path, monkeypatch, has_bfloat16: bool) -> None:
    monkeypatch.setattr("kvmosaic.model.transformers_loading.cpu_has_bfloat16", lambda: has_bfloat16)
    assert load_model(folder, device="cpu").dtype is (torch.bfloat16 if has_bfloat16 else torch.float32)


def test_auto_never_narrows_a_wide_checkpoint(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvmosaic.model.transformers_loading.cpu_has_bfloat16", lambda: True)
    build("llama", torch.float32).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").dtype is torch.float32


def test_float64_works_with_experts(tmp_path: Path) -> None:
    build("mixtral", torch.float32).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu", dtype=torch.float64).dtype is torch.float64


def test_a_tokenizer_in_the_folder_is_loaded(tmp_path: Path) -> None:
    build("llama", torch.float32).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 3, "<end>": 7, "?": 4}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert model.tokenizer.encode("a") == [3]
    assert model.eos_token_ids == (2, 7)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ModelNotFound, match=rf"no config\.json .*kvmosaic serve MODEL {tmp_path}"):
        load_model(tmp_path)
    with pytest.raises(ModelNotFound, match="there is no folder"):
        load_model("./nothing")


def test_weights_that_can_run_code_are_not_read(tmp_path: Path) -> None:
    model = build("llama", torch.float32)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"\*\.safetensors"):
        load_model(tmp_path)


def test_an_unreachable_hub_name_says_what_to_do() -> None:
    with pytest.raises(ModelNotFound, match="give the folder"):
        load_model("nobody/no-such-model", local_files_only=True)


def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(tmp_path: Path) -> None:
    """It is asked for half a minute otherwise, for each file; a name that is mistyped is to be refused at once."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        asked: list[int] = []

        def refuse() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    asked.append(hub.accept()[0].close() or 1)

        threading.Thread(target=refuse, daemon=True).start()
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
        }
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            environment.pop(name, None)
        for command in ("check", "plan"):
            asked.clear()
            arguments = [sys.executable, "-m", "kvmosaic", command, "nobody/no-such-model"]
            ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert ended.returncode == 2, ended.stderr
            assert "'nobody/no-such-model' is neither a folder here nor a model" in ended.stderr
            assert 1 <= len(asked) <= 2
        cached = tmp_path / "hub" / "models--nobody--cached"
        shutil.copytree(bundled_reader(), cached / "snapshots" / ("0" * 40))
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0" * 40)
        arguments = [sys.executable, "-m", "kvmosaic", "check", "nobody/cached"]
        ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0 and "nobody/cached" in ended.stdout, ended.stderr


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not_a_model"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="cannot load"):
        load_model(tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    settings = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="trust_remote_code=True"):
        load_model(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    build("llama", torch.float32).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(UnsupportedModel, match="cannot load"):
        load_model(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    model = build("llama", torch.float32)
    state = {name: value for name, value in model.state_dict().items() if "layers.1" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UnsupportedModel, match=r"layers\.1"):
        load_model(tmp_path)


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"dtype": torch.int8}, {"device": "nowhere"}])
def test_bad_choices_are_named(folder: Path, settings) -> None:
    with pytest.raises(InvalidConfig, match=r"dtype is|device is"):
        load_model(folder, **settings)


@pytest.mark.parametrize("wanted", [0, -1, 4097, True, 2**40])
def test_max_positions_stays_inside_the_model(folder: Path, wanted) -> None:
    with pytest.raises(InvalidConfig, match="between 1 and 4096"):
        load_model(folder, device="cpu", max_positions=wanted)


def test_a_short_sequence_does_not_blind_the_probe(folder: Path) -> None:
    model = load_model(folder, device="cpu", max_positions=1)
    assert model.max_positions == 1
    assert model.layers[0].rotation is not None


def test_numbers_that_are_not_finite_are_refused() -> None:
    model = build("llama", torch.float32)
    model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.inf
    with pytest.raises(UnsupportedModel, match="layer 1 computes numbers that are not finite"):
        LoadedModel.from_module(model)


def test_a_model_with_few_positions_is_probed_inside_them() -> None:
    for family in ("llama", "gpt2"):
        model = LoadedModel.from_module(build(family, max_position_embeddings=12))
        assert model.max_positions == 12
        assert model.is_movable == (family == "llama")


def test_a_model_that_counts_tokens_has_a_limit() -> None:
    model = LoadedModel.from_module(build("llama4", floor_scale=16))
    assert model.max_forward_tokens == model.max_positions == 15
    tokens = torch.full((16,), 5)
    with pytest.raises(UnsupportedModel, match="max_num_batched_tokens"):
        model.forward(tokens, torch.arange(16), torch.tensor([15]), lambda call: call.query)
