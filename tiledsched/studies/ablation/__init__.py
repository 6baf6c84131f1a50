"""Measures what each knob of a tuned schedule is worth, by a ladder from the plain schedule to the tuned one."""
