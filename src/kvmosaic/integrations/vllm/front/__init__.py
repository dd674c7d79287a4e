"""In the API process: how documents reach a request."""
