"""Reads RoPE settings from configurations, and reads and writes patch records as JSON."""
