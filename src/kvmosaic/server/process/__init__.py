"""Process of the server: its listening socket, logs, heap, and the watchdog that ends it in time."""
