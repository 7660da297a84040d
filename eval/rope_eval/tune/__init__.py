"""Options of a method found for one model: its scalars, and the tables of longrope."""
