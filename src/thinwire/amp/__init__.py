"""Everything about GradScalers and loss scales."""
