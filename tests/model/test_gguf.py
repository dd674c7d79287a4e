"""GGUF files: what is read of them, what becomes of it, and what is said about those that cannot be used."""

from __future__ import annotations

import logging
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.gguf import save_gguf
from support.loaded import dense_layout, dense_logits, random_prompt
from support.tiny import save_tiny_model

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams
from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import ModelNotFound, UnsupportedModel, pip_install
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.model.cpu.prepack import has_onednn_for_bfloat16
from kvmosaic.model.formats.gguf.file import read_gguf

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where is the key?"}]


pytestmark = pytest.mark.usefixtures("seen_by_caplog")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reader_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("reader") / "reader.F32.gguf")


@pytest.fixture(scope="module")
def from_file(reader_file: Path) -> LoadedModel:
    return load_model(reader_file, device="cpu", dtype="float32")


def tiny(path: Path, folder: Path, kind: str = "F32", **options: Any) -> Path:
    return save_gguf(path, folder, kind, has_tokenizer=False, **options)


def loaded(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, device="cpu", **{"dtype": "float32", **options})


def refusal(path: Path) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        loaded(path)
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_a_file_and_the_folder_it_was_made_from_give_the_same_logits_and_tokens(from_file: LoadedModel) -> None:
    folder = load_model(bundled_reader(), device="cpu", dtype="float32")
    layout = dense_layout(random_prompt())
    assert torch.equal(dense_logits(from_file, layout), dense_logits(folder, layout))
    text = "The key of the harbour lies behind the blue door."
    assert from_file.tokenizer.encode(text) == folder.tokenizer.encode(text)


def test_template_and_special_tokens_are_those_of_the_file(from_file: LoadedModel) -> None:
    folder = load_model(bundled_reader(), device="cpu", dtype="float32")
    said = {"tokenize": False, "add_generation_prompt": True}
    text = from_file.tokenizer.apply_chat_template(MESSAGES, **said)
    assert text == folder.tokenizer.apply_chat_template(MESSAGES, **said)
    assert from_file.tokenizer.encode(text) == folder.tokenizer.encode(text)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(from_file.tokenizer, name) == getattr(folder.tokenizer, name)
    assert from_file.eos_token_ids == (2,)


def test_a_model_from_a_file_answers_as_the_folder(from_file: LoadedModel) -> None:
    documents = [{"id": "a", "text": "Mira keeps the key in the blue box."}, {"id": "b", "text": "Tom lives in Oslo."}]
    answers = []
    for model in (from_file, load_model(bundled_reader(), device="cpu", dtype="float32")):
        config = ChunkCacheConfig(
            chunk_cache_size="8MiB", position_strategy="sequential", chunk_context="system", repair="none"
        )
        with LLM(model, chunk_cache_config=config, engine_config=EngineConfig(request_cache_size="8MiB")) as llm:
            output = llm.chat(MESSAGES, SamplingParams(max_tokens=12, temperature=0.0), documents=documents)[0]
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_a_loaded_file_is_a_plain_model(from_file: LoadedModel) -> None:
    assert not hasattr(from_file.module.config, "quantization_config")
    assert getattr(from_file.module, "hf_quantizer", None) is None
    assert not getattr(from_file.module, "is_quantized", False)
    assert not from_file.module.config.to_dict().get("quantization_config")


def test_the_line_about_memory_names_file_type_and_sizes(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny(tmp_path / "m.Q8_0.gguf", tiny_folder, "Q8_0")
    with caplog.at_level(logging.INFO, "kvmosaic"):
        model = loaded(path, dtype="bfloat16")
    size, numbers = path.stat().st_size / 1e6, read_gguf(path).num_numbers
    plain = f"{2 * numbers / 1e6:.1f} MB of weights"
    assert model.weights_note == f"m.Q8_0.gguf ({size:.1f} MB in the file, Q8_0) is dequantized to bfloat16: {plain}"
    assert caplog.messages == [model.weights_note]
    assert numbers == model.num_parameters


def test_a_log_has_no_progress_bar(tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded(tiny(tmp_path / "m.gguf", tiny_folder))
    assert "quantizing" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "has_bfloat16", "expected"),
    [
        ("F32", True, torch.float32),
        ("F16", True, torch.bfloat16),
        ("Q8_0", True, torch.bfloat16),
        ("Q8_0", False, torch.float32),
        ("BF16", False, torch.float32),
    ],
)
def test_auto_takes_sixteen_bits_for_rounded_weights_where_the_cpu_has_them(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, has_bfloat16: bool, expected: Any
) -> None:
    monkeypatch.setattr("kvmosaic.model.transformers_loading.cpu_has_bfloat16", lambda: has_bfloat16)
    path = tiny(tmp_path / "m.gguf", tiny_folder, kind)
    assert load_model(path, device="cpu", prepack=False).dtype is expected


@pytest.mark.skipif(not has_onednn_for_bfloat16(), reason="torch has no oneDNN for bfloat16 here")
def test_a_file_can_be_packed(tiny_folder: Path, tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", tiny_folder, "Q8_0")
    assert loaded(path, dtype="bfloat16", prepack="always").is_prepacked


def test_the_fingerprint_depends_on_the_bytes_alone(tiny_folder: Path, tmp_path: Path) -> None:
    path = tiny(tmp_path / "a.gguf", tiny_folder, "Q8_0")
    other = tmp_path / "elsewhere" / "b.gguf"
    other.parent.mkdir()
    shutil.copy(path, other)
    fingerprint = loaded(path).fingerprint
    assert loaded(path).fingerprint == loaded(other).fingerprint == fingerprint
    assert loaded(path, dtype="bfloat16", prepack=False).fingerprint != fingerprint


def test_two_files_never_share_a_fingerprint(tiny_folder: Path, tmp_path: Path) -> None:
    kinds = [tiny(tmp_path / f"{kind}.gguf", tiny_folder, kind) for kind in ("F32", "Q8_0", "Q4_0", "Q4_1")]
    content = bytearray(kinds[1].read_bytes())
    content[-40] ^= 1  # one step of one weight
    edited = tmp_path / "edited.gguf"
    edited.write_bytes(content)
    found = [loaded(path).fingerprint for path in (*kinds, edited)]
    assert len(set(found)) == len(found)


def test_what_lies_beside_a_file_is_not_read(reader_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.symlink_to(reader_file)
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/none", "peft_type": "LORA"}')
    (tmp_path / "chat_template.jinja").write_text("another template")
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    model = loaded(path)
    assert "another template" not in model.tokenizer.chat_template
    assert model.fingerprint == loaded(reader_file).fingerprint


def test_a_profile_lies_beside_its_file_and_two_files_have_two(tiny_folder: Path, tmp_path: Path) -> None:
    from kvmosaic.assembly import profile_place

    first, second = (tiny(tmp_path / f"m.{kind}.gguf", tiny_folder, kind) for kind in ("Q8_0", "Q4_0"))
    assert profile_place(first) == tmp_path / "m.Q8_0.kvmosaic_profile.json"
    assert profile_place(str(second)) == tmp_path / "m.Q4_0.kvmosaic_profile.json"
    assert profile_place(tmp_path / "none.gguf") is None
    assert profile_place(tiny_folder) == tiny_folder / "kvmosaic_profile.json"


def test_every_token_that_ends_an_answer_ends_it(tiny_folder: Path, tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 7}
    model = loaded(tiny(tmp_path / "m.gguf", tiny_folder, metadata=ends))
    assert model.eos_token_ids == (7, 9)


def test_a_file_without_an_end_has_none_of_another_family(tiny_folder: Path, tmp_path: Path) -> None:
    assert loaded(tiny(tmp_path / "m.gguf", tiny_folder)).eos_token_ids == ()


def test_sampling_that_the_file_advises_is_the_default(tiny_folder: Path, tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.5, "general.sampling.top_k": 12, "general.sampling.penalty_repeat": 1.25}
    model = loaded(tiny(tmp_path / "m.gguf", tiny_folder, metadata=said))
    assert model.generation_settings == {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 12,
        "repetition_penalty": 1.25,
    }


def test_factors_of_frequencies_are_applied(tiny_folder: Path, tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 8], dtype=np.float32)
    plain = loaded(tiny(tmp_path / "plain.gguf", tiny_folder))
    model = loaded(tiny(tmp_path / "m.gguf", tiny_folder, tensors={"rope_freqs.weight": factors}))
    expected = plain.module.model.rotary_emb.inv_freq / torch.from_numpy(factors)
    assert torch.equal(model.module.model.rotary_emb.inv_freq, expected)
    assert model.is_movable and model.layers[0].rotation != plain.layers[0].rotation
    ones = tiny(tmp_path / "ones.gguf", tiny_folder, tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert loaded(ones).layers == plain.layers


def test_linear_scaling_is_applied_and_other_scaling_refused(tiny_folder: Path, tmp_path: Path) -> None:
    plain = loaded(tiny(tmp_path / "plain.gguf", tiny_folder))
    said = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    model = loaded(tiny(tmp_path / "linear.gguf", tiny_folder, metadata=said))
    frequencies = plain.module.model.rotary_emb.inv_freq / 4
    torch.testing.assert_close(model.module.model.rotary_emb.inv_freq, frequencies)
    said["llama.rope.scaling.type"] = "yarn"
    assert "frequencies scaled for long prompts (yarn)" in refusal(
        tiny(tmp_path / "m.gguf", tiny_folder, metadata=said)
    )


def test_a_window_that_the_built_model_has_not_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", tiny_folder, metadata={"llama.attention.sliding_window": 64})
    assert "states sliding_window 64" in refusal(path)


def test_a_file_without_a_vocabulary_loads_without_a_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    assert loaded(tiny(tmp_path / "m.gguf", tiny_folder)).tokenizer is None


@pytest.mark.parametrize(
    ("split", "said", "expected"),
    [("gpt-2", True, True), ("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_the_first_token_stands_before_a_text_where_the_file_has_it_so(
    tmp_path: Path, split: str, said: bool | None, expected: bool
) -> None:
    entries = {"tokenizer.ggml.pre": split, "tokenizer.ggml.add_bos_token": said}
    model = loaded(save_gguf(tmp_path / "m.gguf", metadata=entries))
    assert (model.tokenizer.encode("The key")[0] == model.tokenizer.bos_token_id) is expected


def test_an_unknown_split_of_text_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": "unheard-of"})
    with caplog.at_level(logging.WARNING, "kvmosaic"):
        assert loaded(path).tokenizer is not None
    assert "'unheard-of'" in caplog.text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in (tmp_path / "none.gguf", "none.gguf", "~/none.GGUF"):
        with pytest.raises(ModelNotFound, match=r"there is no file .*none"):
            load_model(name)


def test_a_folder_of_files_says_to_give_one(tmp_path: Path) -> None:
    (tmp_path / "m.Q8_0.gguf").write_bytes(b"GGUF")
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match=r"give one of them: m\.Q8_0\.gguf"):
        load_model(tmp_path)
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_model(folder)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert "empty (0 bytes)" in refusal(path)


@pytest.mark.parametrize("name", ["m.gguf", "model.safetensors"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"<!DOCTYPE html>")
    assert "it begins with b'<!DOCTYP'" in refusal(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refusal(path)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused_before_anything_is_loaded(reader_file: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "m.gguf"
    content = reader_file.read_bytes()
    path.write_bytes(content[: max(5, int(share * len(content)))])
    assert "damaged or incomplete" in refusal(path)


def test_another_version_and_another_byte_order_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for layout, version, words in (("<", 1, "has version 1"), ("<", 9, "has version 9"), (">", 3, "big-endian")):
        path.write_bytes(b"GGUF" + struct.pack(layout + "IQQ", version, 0, 0))
        assert words in refusal(path)


def test_a_part_of_a_split_file_says_how_to_join(tiny_folder: Path, tmp_path: Path) -> None:
    words = "part 2 of 3 of a split GGUF"
    assert words in refusal(tiny(tmp_path / "m-00002-of-00003.gguf", tiny_folder))
    path = tiny(tmp_path / "renamed.gguf", tiny_folder, metadata={"split.no": 1, "split.count": 3})
    assert words in refusal(path) and "llama-gguf-split --merge" in refusal(path)


def test_what_is_not_a_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = tiny(tmp_path / "lora.gguf", tiny_folder, metadata={"general.type": "adapter"})
    assert "of type 'adapter'" in refusal(adapter)
    assert "architecture 'clip'" in refusal(tiny(tmp_path / "mmproj.gguf", tiny_folder, architecture="clip"))


def test_an_unknown_architecture_names_those_that_are_read(tiny_folder: Path, tmp_path: Path) -> None:
    said = refusal(tiny(tmp_path / "m.gguf", tiny_folder, architecture="unheardof"))
    assert "architecture 'unheardof', which transformers does not read" in said and "llama" in said


def test_an_unknown_way_of_storing_numbers_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", tiny_folder)
    content = path.read_bytes()
    place = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    path.write_bytes(content[:place] + struct.pack("<I", 999) + content[place + 4 :])
    assert "as type 999" in refusal(path)


def test_a_missing_weight_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", tiny_folder)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    assert "lacks" in refusal(path)


@pytest.mark.parametrize("missing", [("gguf",), ("accelerate",), ("gguf", "accelerate")])
def test_a_missing_package_names_the_extra(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    from kvmosaic.model.formats.gguf import file as gguf_file

    real = gguf_file.find_spec
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name in missing else real(name))
    with pytest.raises(
        UnsupportedModel, match=rf"{' and '.join(missing)} must be installed .*{re.escape(pip_install('gguf'))}"
    ):
        loaded(tiny(tmp_path / "m.gguf", tiny_folder))


def test_code_of_the_hub_is_not_fetched(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmosaic.model.formats.gguf import file as gguf_file

    monkeypatch.setattr(gguf_file, "find_spec", lambda name: name)
    said = refusal(tiny(tmp_path / "m.gguf", tiny_folder, architecture="lfm2"))
    assert "download compiled code" in said


@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_damaged_header_is_refused_or_read_and_never_anything_else(
    data: st.DataObject, reader_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(reader_file.read_bytes())
    end = read_gguf(reader_file).data_start
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, 400) | st.integers(4, end - 8))
        value = data.draw(st.binary(min_size=1, max_size=8))
        content[place : place + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        read_gguf(path)
    except UnsupportedModel as error:
        assert str(path) in str(error)
