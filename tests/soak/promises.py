"""What thinwire promises of faults and does not keep yet: set to True when it does."""

WHOLE_STEP_OVERFLOW = False
"""After an overflow on one rank everything is, on all ranks, as before the step; so that training goes on
exactly as if the step had not been. Today only buckets that overflow are left as they were."""

EXACT_RESUME = False
"""A resumed run equals one that was never stopped from its first backward, whatever DDP's buckets are before
it and with another `bucket_cap_mb`. Today only once DDP has its final buckets."""
