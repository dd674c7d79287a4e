"""Adapting a model to documents that are read apart: its own full attention is the teacher, no labels are needed."""
