"""Tokens of an ordinary text, for self-checks: random ones are ill-conditioned on real weights."""

from __future__ import annotations

from typing import Any

import torch

_TEXT = """\
You answer questions from the documents that you are given. If they do not say it, say that you do not know.

The harbour of Marrowick was built in 1871, after a storm had broken the old pier. For thirty years its cranes loaded \
coal, and later wool and timber. The railway closed in 1964. Today the warehouses hold a museum, two bakeries and a \
school of sailing, and the ferry to the islands leaves at half past seven every morning except on Sundays.

Bread rises because yeast turns sugar into gas. The dough should rest in a warm place until it has doubled; in a cold \
kitchen that takes about two hours. Bake it at 230 degrees for 15 minutes, then at 190 degrees until the crust is brown.

To install the package, run `pip install example` and restart the service. The file settings.toml must contain a port, \
for instance port = 8080, and a list of users. If the service does not start, look at the log: the last line names the \
field that is wrong. Version 2.4 needs Python 3.11 or newer.

Dear Ms Okafor, thank you for your letter of 12 March. We have looked into the delay of your parcel and found that it \
was sent to the wrong depot in Lyon. It will reach you on Thursday, and we have refunded the postage of 14.60 euros.

A comet is a small body of ice and dust. When it comes near the sun, the ice turns to vapour and carries dust with it, \
which makes a tail that always points away from the sun. Most comets come from far beyond the orbit of Neptune.

When did the ferry leave, who had to wait for the parcel, and how long does the dough have to rest? Answer in one line.
"""


def ordinary_tokens(tokenizer: Any, vocab_size: int, count: int) -> list[int]:
    """`count` tokens of ordinary text; random ones without a tokenizer, or if it gives too few."""
    token_ids: list[int] = [] if tokenizer is None else list(tokenizer.encode(_TEXT, add_special_tokens=False))
    token_ids = [token for token in token_ids if token < vocab_size]
    if len(set(token_ids)) < 20:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return [token_ids[number % len(token_ids)] for number in range(count)]
