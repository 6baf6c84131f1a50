"""Building: schedules become machine code. Needs no GPU."""
