"""The table of models that compose inside vLLM: reads vLLM's registry of models, and writes docs/vllm-models.md.

.venv-vllm/bin/python scripts/vllm_models.py

Nothing of vLLM is imported: the classes of a model are followed through its source. Its configuration is the default of
transformers.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
import warnings
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "vllm-models.md"

HEADER = """# Models that compose inside vLLM

Look up your model below (`architectures` in its `config.json`), or check it:

    kvmosaic check path/to/a/model --vllm

Written by `scripts/vllm_models.py` from the registry and the source of vLLM {vllm}, and the default configurations of
transformers {transformers}. Every worker tests cache, rotation and attention when vLLM
starts ([what is exact](vllm.md#what-is-exact)) and can still refuse a model below, with the reason in the log. Tests of
this project run Llama, Qwen 2 and 3, Gemma 2 to 4, EXAONE 4, DeepSeek V2 (keys and values, and latent),
Qwen2-VL, Qwen2.5-VL and Qwen3-VL; the others were not run.

{num_composes} architectures compose, {num_depends} depend on their configuration, {num_not} do not; pooling models and
draft models are left out.

Models that also take images or sound compose prompts of text alone, without repair and text between documents; their
language model decides.
"""
WINDOWS_OF_SOME = "layers with windows: start vLLM with `--disable-hybrid-kv-cache-manager`"
COMPOSES = f"""
With the default configuration. "{WINDOWS_OF_SOME[0].upper()}{WINDOWS_OF_SOME[1:]}" also holds for others of this table
whose configuration has [such layers](vllm.md#models-with-sliding-windows) (`sliding_window`, `layer_types`) beside
others.
"""
DEPENDS = """
Where every layer has a window, vLLM frees the tokens that it has left, with any option.
"""


@dataclass
class Traits:
    """What the classes of a model use."""

    names: set[str] = field(default_factory=set)
    """Names of classes, functions, attributes and keyword arguments."""
    bases: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    """Short string constants."""


@dataclass(frozen=True)
class Verdict:
    """Whether an architecture composes: "composes", "depends" or "not", and the reason or the condition."""

    kind: str
    why: str


class Models:
    """vLLM's registry and the source of its models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tree = cache(self._parse)

    def registry(self) -> dict[str, dict[str, tuple[str, str]]]:
        """By group of the registry and architecture: module and class."""
        tree = self._tree("vllm.model_executor.models.registry")
        assert tree is not None
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Dict)
                and isinstance(node.targets[0], ast.Name)
            ):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                found[node.targets[0].id] = {
                    key.value: tuple(part.value for part in value.elts)  # type: ignore[attr-defined, misc]
                    for key, value in pairs
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
                }
        return found

    def traits(self, module: str, name: str) -> Traits:
        """What a class and all classes of models that it names use."""
        full = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        traits = Traits()
        self._follow(full, name, traits, set())
        return traits

    def _follow(self, module: str, name: str, traits: Traits, seen: set[tuple[str, str]]) -> None:
        origin = self._find(module, name)
        if origin is None or origin in seen:
            return
        seen.add(origin)
        node = self._definition(*origin)
        assert node is not None
        if isinstance(node, ast.ClassDef):
            traits.bases |= {ast.unparse(base).split("[")[0] for base in node.bases}
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and len(each.value) < 40:
                traits.texts.add(each.value)
            elif isinstance(each, ast.keyword) and each.arg:
                traits.names.add(each.arg)
            elif isinstance(each, ast.Attribute):
                traits.names.add(each.attr)
            elif isinstance(each, ast.Name):
                traits.names.add(each.id)
                self._follow(origin[0], each.id, traits, seen)

    def _find(self, module: str, name: str) -> tuple[str, str] | None:
        """Module and name of a definition among the models; re-exports are followed."""
        for _ in range(6):
            if self._definition(module, name) is not None:
                return module, name
            imported = self._imports(module).get(name)
            if imported is None or not imported[0].startswith(("vllm.model_executor.models", "vllm.models.")):
                return None
            module, name = imported
        return None

    @cache  # noqa: B019  # one object per run
    def _imports(self, module: str) -> dict[str, tuple[str, str]]:
        tree = self._tree(module)
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                if node.level:
                    is_package = self._path(module).name == "__init__.py"
                    parts = module.split(".")[: len(module.split(".")) - node.level + is_package]
                    origin = ".".join([*parts, *filter(None, [node.module])])
                found |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
        return found

    @cache  # noqa: B019
    def _definition(self, module: str, name: str) -> ast.AST | None:
        tree = self._tree(module)
        kinds = (ast.ClassDef, ast.FunctionDef)
        nodes = tree.body if tree is not None else ()
        return next((node for node in nodes if isinstance(node, kinds) and node.name == name), None)

    def _path(self, module: str) -> Path:
        path = self._folder.parent / module.replace(".", "/")
        return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"

    def _parse(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def default_configs() -> dict[str, Any]:
    """By architecture: the class of its configuration in transformers."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found: dict[str, Any] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        for model_type, names in mapping.items():
            for name in [names] if isinstance(names, str) else names:
                found[name] = model_type
    return {name: configuration_auto.CONFIG_MAPPING[kind] for name, kind in found.items() if _is_known(kind)}


def _is_known(model_type: str) -> bool:
    from transformers.models.auto import configuration_auto

    return model_type in configuration_auto.CONFIG_MAPPING


def default_of(config_class: Any) -> Any:
    """The default configuration of a model; None: unknown."""
    if config_class is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return config_class()
    except Exception:  # a configuration without defaults
        return None


def windows_of(config: Any) -> str:
    """Which layers of a configuration have windows: "none", "some", "all", "chunks" of positions, or "unknown"."""
    if config is None:
        return "unknown"
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ())
    if "chunked_attention" in layers:
        return "chunks"
    if layers:
        return "none" if "sliding_attention" not in layers else "some" if "full_attention" in layers else "all"
    if getattr(text, "use_sliding_window", True) is False or getattr(text, "sliding_window", None) is None:
        return "none"
    return "all"


RECURRENT = {"IsHybrid", "HasInnerState", "IsAttentionFree"}
LANGUAGE_MODEL = {"init_vllm_registered_model", "maybe_get_text_model"}
WINDOWS = {"per_layer_sliding_window", "sliding_window", "interleaved_sliding_window"}
STARTS = {"Gemma4ForCausalLM": "E2B and E4B do not start so"}
"""What else decides, as far as models were run."""


def verdict(architecture: str, traits: Traits, config_class: Any, *, is_transformers: bool) -> Verdict:
    """Decides from what the model's classes use, and from its default configuration."""
    names, config = traits.names, default_of(config_class)
    if is_transformers:
        return Verdict(
            "not", "`model`: runs through vLLM's transformers backend, where the rotation of its keys is not seen"
        )
    if traits.bases & RECURRENT:
        return Verdict(
            "not", "`cache_groups`: layers with a recurrent or convolutional state, which no document has alone"
        )
    if "CrossAttention" in names or "BlockDiffusion" in architecture:
        return Verdict("not", "`encoder`: cross-attention, or attention that is not causal")
    if "get_rope" not in names and not any(name.endswith("RotaryEmbedding") for name in names):
        reason = (
            "a bias by distance (ALiBi)"
            if "get_alibi_slopes" in names
            else "learned positions or a rotation of its own"
        )
        return Verdict("not", f"`model`: no rotary embedding of vLLM's ({reason})")
    if {"Indexer", "SparseAttnIndexer", "DeepseekCompressor"} & names and hasattr(config, "index_topk"):
        return Verdict("not", "`model`: attention selects tokens by an index of their own keys")
    conditions = []
    if {"Indexer", "SparseAttnIndexer"} & names and config is None:
        conditions.append("`index_topk` is not set (attention that selects tokens by an index)")
    if "get_alibi_slopes" in names or "_get_alibi_slopes" in names:
        conditions.append("`alibi` is off (a bias by distance)")
    windows = windows_of(config)
    if windows == "chunks":
        conditions.append("no layer attends by chunks of positions (`layer_types`; the default has them)")
    elif windows == "all":
        conditions.append("some layer has no window (`sliding_window`, `layer_types`; all of the default have one)")
    elif windows == "unknown" and WINDOWS & (names | traits.texts):
        conditions.append("some layer has no window (`sliding_window`, `layer_types`)")
    if conditions:
        return Verdict("depends", "; ".join(conditions))
    remarks = [WINDOWS_OF_SOME * (windows == "some"), STARTS.get(architecture, ""), _remarks(traits)]
    return Verdict("composes", "; ".join(filter(None, remarks)))


def around(traits: Traits, config_class: Any, text: dict[str, Verdict]) -> Verdict | None:
    """The verdict of a model around a language model of vLLM's; None: it is none."""
    if "SupportsMultiModal" not in traits.bases or traits.bases & RECURRENT:
        return None
    if not traits.names & LANGUAGE_MODEL and "get_rope" in traits.names:
        return None  # its language model is part of it
    named = traits.texts & text.keys() or _text_architectures(config_class) & text.keys()
    remarks = _remarks(traits)
    if not named:
        return Verdict("depends", "its language model is an architecture that composes")
    kinds = {text[name].kind for name in named}
    models = ", ".join(f"`{name}`" for name in sorted(named))
    if kinds == {"composes"}:
        return Verdict("composes", f"{remarks}; by its language model, {models}")
    if kinds == {"not"}:
        return Verdict("not", f"its language model does not: {models}")
    return Verdict("depends", f"its language model composes: {models}")


def _text_architectures(config_class: Any) -> set[str]:
    """Architectures of the language model in a default configuration."""
    from transformers.models.auto import modeling_auto

    config = default_of(config_class)
    if config is None:
        return set()
    names: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get_text_config().model_type, ())
    return {names} if isinstance(names, str) else set(names)


def _remarks(traits: Traits) -> str:
    remarks = []
    if {"MultiHeadLatentAttentionWrapper", "MLAAttention"} & traits.names:
        remarks.append("latent (MLA): the rotary part of a row is rotated")
    if "SupportsMRoPE" in traits.bases:
        remarks.append("several positions per token (M-RoPE): prompts without an image")
    elif "SupportsMultiModal" in traits.bases:
        remarks.append("prompts without an image or sound")
    if {"FusedMoE", "SharedFusedMoE"} & traits.names:
        remarks.append("experts")
    return "; ".join(remarks)


def verdicts(folder: Path) -> list[tuple[str, Verdict]]:
    """The architectures that answer prompts, by name."""
    models, configs = Models(folder), default_configs()
    registry = models.registry()
    found: dict[str, Verdict] = {}
    for group in ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"):
        for architecture, place in registry[group].items():
            found[architecture] = verdict(
                architecture,
                models.traits(*place),
                configs.get(architecture),
                is_transformers=group == "_TRANSFORMERS_SUPPORTED_MODELS",
            )
    text = dict(found)
    for architecture, place in registry["_MULTIMODAL_MODELS"].items():
        traits, config_class = models.traits(*place), configs.get(architecture)
        of_its_own = verdict(architecture, traits, config_class, is_transformers=False)
        is_causal = "BlockDiffusion" not in architecture
        found[architecture] = (around(traits, config_class, text) if is_causal else None) or of_its_own
    return sorted(found.items(), key=lambda each: each[0].lower())


def table() -> str:
    """The whole page."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed here: run it by .venv-vllm/bin/python"
    rows: dict[str, list[tuple[str, str]]] = {"composes": [], "depends": [], "not": []}
    for architecture, found in verdicts(Path(spec.origin).parent):
        rows[found.kind].append((architecture, found.why))
    text = HEADER.format(
        vllm=version("vllm").split("+")[0],
        transformers=version("transformers"),
        num_composes=len(rows["composes"]),
        num_depends=len(rows["depends"]),
        num_not=len(rows["not"]),
    )
    text += _section("Composes", COMPOSES, ("architectures", "remarks"), rows["composes"])
    text += _section("Depends on the configuration", DEPENDS, ("architectures", "composes where"), rows["depends"])
    why = "\nA word in code is the `reason` of the metric `kvmosaic:bypassed_requests_total`.\n"
    return text + _section("Does not compose", why, ("architectures", "why"), rows["not"])


def _section(title: str, lead: str, columns: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    groups: dict[str, list[str]] = {}
    for name, why in rows:
        groups.setdefault(why, []).append(f"`{name}`")
    several = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [f"| {columns[0]} | {columns[1]} |", "| --- | --- |"]
    lines += [f"| {', '.join(names)} | {why} |" for why, names in several]
    return f"\n## {title}\n{lead}\n" + "\n".join(lines) + "\n"


def main() -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write")
    output = parser.parse_args().output
    text = table()
    output.write_text(text, encoding="utf-8")
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
