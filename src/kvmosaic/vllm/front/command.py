"""`vllm serve` with documents: builds the command line that a user would have to write by hand."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from kvmosaic.config import variable_of
from kvmosaic.errors import InvalidConfig, pip_install
from kvmosaic.tiers import parse_tier_url
from kvmosaic.vllm.front.settings import FrontSettings
from kvmosaic.vllm.plugin import NAME
from kvmosaic.vllm.settings import (
    FROM_VARIABLE,
    document_cache,
    document_reads,
    is_composing_required,
    tier_config,
)

MIDDLEWARE = "kvmosaic.vllm.ComposedDocuments"
TIER_VARIABLE = "KVMOSAIC_VLLM_TIER_"
"""Prefix of the variable, with a number, that holds the URL of a tier with a password."""
_RUST = "VLLM_USE_RUST_FRONTEND"
_MAIN = "vllm.entrypoints.cli.main"


@dataclass(frozen=True, slots=True)
class Launch:
    """A program with its arguments and environment variables."""

    arguments: tuple[str, ...]
    """Arguments after `vllm`."""
    variables: Mapping[str, str]

    @property
    def shown_variables(self) -> dict[str, str]:
        """The variables with passwords hidden, for printing."""
        return {name: _shown(name, value) for name, value in self.variables.items()}

    @property
    def command(self) -> tuple[str, ...]:
        """The whole command, with the vLLM of this Python."""
        return (sys.executable, "-m", _MAIN, *self.arguments)


def serving(
    arguments: Sequence[str],
    choices: Mapping[str, str | None],
    tiers: Sequence[str] = (),
    loading: str | None = None,
) -> Launch:
    """Builds `vllm serve` with these arguments, plus ours where the user has set none.

    Args:
        arguments: a model and options of vLLM.
        choices: settings of the front end by variable name, such as chunk_separator; None: left alone.
        tiers: URLs of tiers, the fastest first; one with a password becomes a variable, which vLLM does not print.
        loading: auto or always; None: left alone.

    Raises:
        InvalidConfig: no model, an invalid choice, vLLM's front end in Rust, prefix caching disabled, loading without
            tiers, tiers together with a configuration, or a configuration of another connector.
    """
    variables = {variable_of(name): value for name, value in choices.items() if value is not None}
    FrontSettings.from_environment({**os.environ, **variables})  # fail now, not once vLLM is up
    reads = document_reads({**os.environ, **variables})
    document_cache({}, {**os.environ, **variables})
    is_composing_required({}, {**os.environ, **variables})
    if not arguments:
        raise InvalidConfig("no model is given; write for example: kvmosaic vllm serve Qwen/Qwen3-0.6B")
    if os.environ.get(_RUST, "0") != "0":
        raise InvalidConfig(
            f"{_RUST} is {os.environ[_RUST]!r:.80}, and vLLM's front end in Rust runs no middleware, so no document "
            "would be composed; unset it"
        )
    if _has(arguments, "--no-enable-prefix-caching"):
        raise InvalidConfig(
            "--no-enable-prefix-caching is given, and documents are kept in vLLM's prefix cache; leave it out"
        )
    if loading is not None and not tiers:
        raise InvalidConfig(
            f"--chunk-loading is {loading!r} and there is no tier; add one, such as --chunk-tier host:4GiB"
        )
    added: list[str] = []
    if not _has(arguments, "--kv-transfer-config"):
        extra = _tiers(tiers, loading, variables)
        configuration = {"kv_connector": NAME, "kv_role": "kv_both"} | extra
        added += ["--kv-transfer-config", json.dumps(configuration)]
    elif tiers:
        raise InvalidConfig(
            "--chunk-tier and --kv-transfer-config are both given; write the tiers into the latter: "
            '"kv_connector_extra_config": {"tiers": ["host:4GiB"]}'
        )
    elif not _names(arguments, "--kv-transfer-config", NAME):
        raise InvalidConfig(
            f"--kv-transfer-config does not name {NAME}, so no document would be composed; leave it out, or give "
            f'{{"kv_connector": "{NAME}", "kv_role": "kv_both"}}'
        )
    if not any(argument.endswith(MIDDLEWARE.rpartition(".")[2]) for argument in arguments):
        added += ["--middleware", MIDDLEWARE]
    if not _has(arguments, "--enable-prefix-caching"):
        added.append("--enable-prefix-caching")
    if reads == "in-place" and not any(map(_chooses_graphs, arguments)):
        added += ["--compilation-config", json.dumps({"cudagraph_mode": "PIECEWISE"})]
    return Launch(("serve", *arguments, *added), variables)


def _tiers(urls: Sequence[str], loading: str | None, variables: dict[str, str]) -> dict[str, dict[str, object]]:
    """Tier settings for the configuration; URLs with a password go to `variables`."""
    if not urls:
        return {}
    places = []
    for number, url in enumerate(urls, 1):
        if "@" in url:
            variables[f"{TIER_VARIABLE}{number}"] = url
            url = f"{FROM_VARIABLE}{TIER_VARIABLE}{number}"
        places.append(url)
    extra: dict[str, object] = {"tiers": places} | ({} if loading is None else {"loading": loading})
    tier_config(extra, {**os.environ, **variables})  # fail now, not once vLLM is up
    return {"kv_connector_extra_config": extra}


def check_installed() -> None:
    """Raises InvalidConfig unless vLLM is installed for this Python."""
    if find_spec("vllm") is None:
        raise InvalidConfig(
            f"vLLM is not installed for this Python; install it with: {pip_install('vllm')} (on a CPU, in a "
            "checkout: make .venv-vllm/.installed)"
        )


def _shown(name: str, value: str) -> str:
    return parse_tier_url(value).address if name.startswith(TIER_VARIABLE) else value


def _has(arguments: Sequence[str], option: str) -> bool:
    """Whether an option is present, as vLLM parses it: with - or _, with = or a separate value."""
    names = (argument.partition("=")[0].partition(".")[0].replace("_", "-") for argument in arguments)
    return option in names


def _chooses_graphs(argument: str) -> bool:
    """Whether an option decides on CUDA graphs; with full ones, which are vLLM's default, documents would be copied."""
    return argument.startswith(("-O", "-cc")) or _has([argument], "--compilation-config") or "eager" in argument


def _names(arguments: Sequence[str], option: str, word: str) -> bool:
    """Whether the word is in the value of an option, after = or in the next argument."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return any(_has([argument], option) and word in argument + value for argument, value in pairs)
