"""Terminal output of the command line: strips, tables, progress bars, the demo."""
