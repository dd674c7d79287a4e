"""Tokens of an ordinary text: random ones produce activations that do not occur otherwise."""

from __future__ import annotations

from typing import Any

import torch

_TEXT = """
The mill at the lower end of the valley was built in 1907, when the railway had come as far as the bridge. For
thirty years it ground the wheat of the farms on both banks; then the larger mills in the city took over, and
the owner sold it to a potter, who kept the wheel and took out the stones. Visitors ask most often how the water
was led to the wheel. A wooden channel, about two hundred metres long, brought it from a weir above the village;
in dry summers the miller could only work for three or four hours a day, and people had to wait for their flour.
The ferry is older. It is first mentioned in a letter of 1742, in which the abbot complains about the price of a
crossing: two pennies for a man, five for a man with a horse. Today it carries cars as well, leaves every twenty
minutes between six in the morning and ten at night, and is free for everyone who lives on Oak Island. The
school there has two teachers and nineteen children. "In winter, when the river freezes," one of them wrote, "we
walk to the other side, and nobody is late." The council has discussed a new bridge since 1988. Its cost,
estimated at 14.5 million, would have to be shared by the county and both villages, and a vote in March decided
against it with 212 to 187. So the ferry stays, and so does the mill, whose roof was repaired last year with
money from a lottery. On Sundays there is coffee, and the wheel turns for the guests.
"""


def ordinary_tokens(model_config: Any, num_tokens: int) -> tuple[int, ...]:
    """The first tokens of a text in the model's vocabulary; without a tokenizer, distinct tokens."""
    vocabulary = int(model_config.get_vocab_size())
    try:
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        found = list(cached_tokenizer_from_config(model_config).encode(_TEXT))
    except Exception:  # none was requested, or one that only vLLM's front end can load
        found = []
    found = [int(token) for token in found if 0 <= int(token) < vocabulary]
    shuffled = torch.randperm(min(vocabulary, 2**15), generator=torch.Generator().manual_seed(0)).tolist()
    return (*found, *shuffled * (1 + num_tokens // len(shuffled)))[:num_tokens]
