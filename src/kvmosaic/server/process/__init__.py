"""Process of the server: its listening socket, logs and heap."""
