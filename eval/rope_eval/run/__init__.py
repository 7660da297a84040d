"""From settings to outcomes: what is to be measured, and measuring it."""
