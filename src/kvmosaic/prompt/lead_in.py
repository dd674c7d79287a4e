"""The lead-in: a short text in front of documents when they are computed, which no prompt contains.

A document computed right after the system prompt has never seen that another document stands before it, and in a
prompt one mostly does. Its keys and values are nearer to what they are there if it has seen *some* text of the kind:
which one matters little, as long as it is about a paragraph, best in the language of the documents. (An empty space of
that length, random tokens, or the document itself in its place do not help; on SmolLM2-135M they were measured.)
"""

from __future__ import annotations

LEAD_IN = (
    "Stone bridges were built in many parts of the world long before engineers could calculate the forces in them. "
    "Builders relied on experience: an arch that had stood for a century was copied, with small changes, by the next "
    "generation. Some of these bridges are still in use, although the roads that cross them have been widened several "
    "times. In the nineteenth century iron and later steel made longer spans possible, and the number of new bridges "
    "grew quickly, along with the railways. Towns usually paid for repairs from tolls, which were abolished in most "
    "places by 1900. Today about a third of the older bridges are protected as monuments, and visitors come to see "
    "them mainly in summer."
)
"""The text that is used if nothing is said."""
MAX_LEAD_IN_CHARACTERS = 20_000
