"""Documents in chat templates: where a template puts them, and the text around each."""
