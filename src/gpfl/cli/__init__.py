"""The command line: one module per command, the option groups they share, progress and terminal output."""
