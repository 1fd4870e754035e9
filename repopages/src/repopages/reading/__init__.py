"""Facts about a checkout: modules, names, docstrings, and the tests and pages around them."""
