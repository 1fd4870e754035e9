"""Collectives, their static order, and the engine that issues them. No other package issues collectives."""
