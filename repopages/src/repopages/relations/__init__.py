"""All files together: who imports, tests and mentions whom."""
