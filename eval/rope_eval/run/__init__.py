"""Plans and runs measurements, from settings to outcomes."""
