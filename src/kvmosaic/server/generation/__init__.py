"""What the answering routes of every API share: fields, prompts, documents, answers, usage and streams."""
