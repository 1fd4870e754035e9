"""Programs: generators that average one bucket of gradients by yielding collectives."""
