"""Worker side, in every worker: location of keys and values, and rotation of keys."""
