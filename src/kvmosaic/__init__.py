"""kvmosaic: language models that answer from documents whose keys and values were computed once."""
