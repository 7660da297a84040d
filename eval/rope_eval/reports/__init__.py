"""What is printed and written about a run. Nothing here changes an outcome."""
