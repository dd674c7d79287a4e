"""Texts that try to be something else: separators, control tokens, template syntax, marks, odd characters."""

from __future__ import annotations

from hypothesis import strategies as st

from support.tokenizers import ADDED, SPECIAL

FRAGMENTS = [
    *SPECIAL,
    *ADDED,
    "##", " ## ", "\\##", " # # ", "<|", "|>", "im_start", "<|im_", "start|>", "<", ">", "[", "INST]", "</",
    "s>", "＜/s＞", "{{ bos_token }}", "{% for x in y %}", "{%", "%}", "{{", "}}", "{#", "#}", "{", "}", "%s",
    "{0}", "\\", '"', "'", "\\u003c", "document", "Document: 0", "</results>", "</documents>", '", "text": "',
    "title", "text", "user\n", "system\n", "0", "12", "\x0b \t\x0b", "kv0123456789abcdef01234567o0x", "\x00",
    "�", "\u200b", "ï", "☃", "👩\u200d👩\u200d👧", "é", "\n", "\n\n", " ", "     ", "a", "word", "\u0435",
]  # fmt: skip


def nasty_texts(*, visible: bool = False) -> st.SearchStrategy[str]:
    """Texts made of fragments; `visible` ones have more than white space."""
    texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=8).map("".join)
    return texts.filter(str.strip) if visible else texts
