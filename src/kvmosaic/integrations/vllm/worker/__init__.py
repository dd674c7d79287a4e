"""In every worker: where keys and values lie, and how keys are turned."""
