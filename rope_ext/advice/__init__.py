"""What is there, what is advisable, and what a patch does to every rotary pair."""
