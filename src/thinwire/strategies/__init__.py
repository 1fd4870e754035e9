"""The strategies that `attach` accepts: gradient programs, averaged models, ZeRO and schedules."""
