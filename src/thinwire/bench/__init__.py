"""Is it worth it? Programs, links and world sizes, measured side by side."""
