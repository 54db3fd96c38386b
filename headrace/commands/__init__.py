"""One module per command; ``headrace.cli`` loads them when they are called."""
