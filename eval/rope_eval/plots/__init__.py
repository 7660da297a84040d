"""Plots. matplotlib (the ``eval`` extra) is imported only when a plot is drawn."""
