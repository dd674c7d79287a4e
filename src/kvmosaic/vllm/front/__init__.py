"""API-process side of the plugin: how documents reach a request."""
