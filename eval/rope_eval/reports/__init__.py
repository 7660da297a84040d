"""Prints and writes reports. Nothing here changes an outcome."""
