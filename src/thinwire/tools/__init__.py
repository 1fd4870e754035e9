"""Command-line tools: the lab, the benchmark, reports. Nothing else imports them."""
