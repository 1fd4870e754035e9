"""Averaged models whose replicas come and go. A service outside agrees on who takes part in each exchange."""
