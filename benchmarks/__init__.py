"""Measurements: commands that print a table. Nothing here is asserted, and nothing outside imports it."""
