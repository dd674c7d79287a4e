"""Small real tokenizers, trained on a few sentences, and chat templates of the kinds that models have."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "You are a helpful assistant. Answer the question from the documents.",
    "The river Aller rises near Eggenstedt and flows into the Weser. It is 215 km long.",
    "What does the document say about the harbour of Brindisi? It was built in 1929.",
    "system user assistant document title text question answer user_1 doc_id results",
    "Grüße aus Köln, ça va? ☃ наука 中文 — and some more words, words and words.\n\nA new line.",
] * 3

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|document|>", "[INST]", "[/INST]"]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim|>"]
"""Added tokens that are not special, as in many models."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""No documents, contents as they are."""

DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{%- if message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\n' + content }}"
    '{%- for call in message.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""No documents, a system text of its own, tool calls, and reasoning cut out of the history."""

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""No documents, the system text inside the first message of the user."""

READER = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ '<|im_start|>' + messages[0].content + '\n' }}"
    "{% set messages = messages[1:] %}{% endif %}{% for document in documents or [] %}"
    "{{ '<|document|>' + (document.title + '\n' if document.title else '') + document.text + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_end|>' + message.content + '\n' }}{% endfor %}"
)
"""Documents behind a token of their own."""

GRANITE = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{%- else %}{% set system = 'Today is a fine day.' %}{% endif %}"
    "{{- '<|im_start|>system<|fim|>' + system + '<|im_end|>\n' }}"
    "{%- for document in documents or [] %}"
    "{{- '<|im_start|>document {\"document_id\": \"' + document['doc_id'] | string + '\"}<|fim|>\n' }}"
    "{{- document['text'] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '<|fim|>' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|fim|>' }}{% endif %}"
)
"""Documents as messages of their own, with an id and without a title."""

COHERE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}"
    "{% endif %}{% if documents %}{{ '<results>' }}{% for document in documents %}{{ '\nDocument: ' }}{{ loop.index0 }}"
    "{% for key, value in document.items() %}{{ '\n' + key + ': ' + value }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{{ '</results>' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '<|fim|>' + message.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|fim|>' }}{% endif %}"
)
"""Numbered documents, every field on a line; contents are trimmed."""

TOJSON = (
    "{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}"
    "{% set messages = messages[1:] %}{% endif %}{% if documents %}{{ '<documents>' }}"
    "{% for document in documents %}{{ '\n' + document | tojson }}{% endfor %}{{ '\n</documents>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Documents as lines of JSON inside the system message."""

JOINED = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}"
    "{% endif %}{% if documents %}{{ '\n\nDocuments:\n' }}{% for document in documents %}{% if document.title %}"
    "{{ document.title + ': ' }}{% endif %}{{ document.text }}{% if not loop.last %}{{ '\n---\n' }}{% endif %}"
    "{% endfor %}"
    "{{ '\n\n' }}{% endif %}{% for message in messages %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endfor %}"
)
"""Documents with a line between them, but not around them."""


def _chatml_with(documents: str) -> str:
    return "{{ '<|im_start|>system\n' }}" + documents + "{{ '<|im_end|>\n' }}" + CHATML


COUNTED = _chatml_with(
    "{% if documents %}{{ 'Here are ' }}{{ documents | length }}{{ ' documents.\n' }}{% for document in documents %}"
    "{{ document.text + '\n' }}{% endfor %}{% endif %}"
)
REVERSED = _chatml_with("{% for document in (documents or []) | reverse %}{{ document.text + '\n' }}{% endfor %}")
REPEATED = _chatml_with(
    "{% for document in documents or [] %}{{ document.text + '\n' + document.text + '\n' }}{% endfor %}"
)
DROPPED = _chatml_with("{% for document in (documents or [])[:1] %}{{ document.text + '\n' }}{% endfor %}")
SHOUTING = _chatml_with("{% for document in documents or [] %}{{ document.text | upper + '\n' }}{% endfor %}")
TITLES_ONLY = _chatml_with("{% for document in documents or [] %}{{ document.title }}{{ '\n' }}{% endfor %}")
TITLED = _chatml_with(
    "{% for document in documents or [] %}{{ document.title + ': ' + document.text + '\n' }}{% endfor %}"
)
"""Documents without a title make an error."""
HEADED = _chatml_with(
    "{% if documents and documents[0].title %}{{ 'These have titles.\n' }}{% endif %}"
    "{% for document in documents or [] %}{{ document.text + '\n' }}{% endfor %}"
)
"""The text before the documents depends on them."""
INTERLEAVED = _chatml_with(
    "{% for document in documents or [] %}{{ document.text + '\n' + messages[0].content + '\n' }}{% endfor %}"
)
"""A message between the documents."""
AFTER = CHATML.replace(
    "{% if add", "{% for document in documents or [] %}{{ document.text + '\n' }}{% endfor %}{% if add"
)
"""Documents behind the question."""

PLACING_TEMPLATES = {"reader": READER, "granite": GRANITE, "cohere": COHERE, "tojson": TOJSON, "joined": JOINED}
OTHER_TEMPLATES = {
    "chatml": CHATML,
    "default_system": DEFAULT_SYSTEM,
    "llama2": LLAMA2,
    "counted": COUNTED,
    "reversed": REVERSED,
    "repeated": REPEATED,
    "dropped": DROPPED,
    "shouting": SHOUTING,
    "titles_only": TITLES_ONLY,
    "titled": TITLED,
    "headed": HEADED,
    "interleaved": INTERLEAVED,
    "after": AFTER,
}
TEMPLATES = PLACING_TEMPLATES | OTHER_TEMPLATES


@lru_cache
def _trained(kind: str) -> str:
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        )
    else:
        # As in sentencepiece: the special tokens are in the vocabulary of the model itself, with the best score.
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(
            vocab_size=500, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
        )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer.to_str()


def make_tokenizer(
    template: str | None = None, kind: str = "byte_level", *, begin: bool = True, end: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer of kind "byte_level" or "unigram"; `begin` and `end` say what it puts around a whole prompt."""
    tokenizer = Tokenizer.from_str(_trained(kind))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer.add_tokens([AddedToken("kvmosaic", special=False), AddedToken("    ", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{'<s> ' * begin}$A{' </s>' * end}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>" if kind == "unigram" else None,
        extra_special_tokens=SPECIAL[3:],
    )
    wrapped.chat_template = template
    return wrapped
