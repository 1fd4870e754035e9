"""When to average parameters, which of them, and over whom."""
