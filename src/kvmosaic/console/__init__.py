"""What people see in a terminal: strips, tables, progress, the demo."""
