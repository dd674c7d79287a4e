"""The Hugging Face hub: whether it answers, before transformers asks it again and again."""

from __future__ import annotations

from pathlib import Path

TIMEOUT_SECONDS = 10.0


def hub_options(source: str, revision: str | None = None) -> dict[str, bool]:
    """`local_files_only` for a hub name where the hub does not answer.

    transformers retries each file for half a minute. This way a downloaded model loads at once, and a mistyped name is
    refused at once.
    """
    if Path(source).is_dir():
        return {}
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json", revision=revision), timeout=TIMEOUT_SECONDS)
    except (HfHubHTTPError, ValueError):
        return {}  # it answered, or the name is none: transformers says what is wrong
    except Exception:  # the errors of an HTTP client, which is another one in each version of the hub's package
        return {"local_files_only": True}
    return {}
