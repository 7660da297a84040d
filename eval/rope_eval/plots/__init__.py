"""Pictures. matplotlib, the ``eval`` extra, is imported only to draw."""
