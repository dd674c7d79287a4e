"""The lead-in: a short text before documents during prefill, which is not part of any prompt.

A document computed right after the system prompt has never seen another document before it, but in a prompt there is
one, unless it comes first. Its keys and values are closer to those of the full prompt if it has seen *some* text of
the kind: about a paragraph of explanation, best in the language of the documents. (In trials on SmolLM2-135M and
XQuAD, an empty space of that length, random tokens, or the document itself in its place did not help, and paragraphs
full of names and numbers helped less.)
"""

from __future__ import annotations

LEAD_IN = (
    "Rain was explained in many ways before it was measured. The most common account in older books was that clouds "
    "were squeezed by the wind, as a sponge is by a hand, and this explanation was repeated for centuries because "
    "it was simple. It became clear only later that water rises from the sea as vapor, cools, and falls when the "
    "drops have become too heavy to float. The first gauges were open vessels, read once a day, and their readings "
    "differed so much that most observers did not trust them. Today the amount of rain is given as the height of "
    "the water that would stand on flat ground, and the word 'shower' has kept a meaning of its own: rain that "
    "begins and ends suddenly."
)
"""The default lead-in."""
MAX_LEAD_IN_CHARACTERS = 20_000
