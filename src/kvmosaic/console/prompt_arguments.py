"""Arguments and options that give a command its prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmosaic.console.model_options import ModelOptions
from kvmosaic.console.options import Documents, PromptText, Questions, System

if TYPE_CHECKING:
    from kvmosaic.console.prompt_source import PromptSource


@dataclass(frozen=True, slots=True)
class PromptArguments:
    """A prompt text, or questions about a folder of documents."""

    prompt: PromptText = None
    documents: Documents = None
    question: Questions = None
    system: System = None

    def read(self, command: str, opening: ModelOptions, tenant: str = "") -> tuple[ModelOptions, PromptSource]:
        """Returns the model and the prompts; a lone "-" is the prompt, not the model.

        Raises:
            InvalidPrompt: nothing is asked, or a prompt is given as the model.
        """
        from kvmosaic.console.prompt_source import PromptSource, check_model_is_not_a_prompt

        prompt = self.prompt
        if opening.model == "-":
            opening, prompt = ModelOptions(values=opening.values), "-"
        separator = opening.values["chunk_separator"]
        check_model_is_not_a_prompt(command, opening.model, separator, is_asked=bool(prompt or self.question))
        return opening, PromptSource(prompt, self.documents, tuple(self.question or ()), self.system, tenant)
