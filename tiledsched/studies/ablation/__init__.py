"""What each knob of a tuned schedule is worth: the ladder from the plain kernel to the tuned one."""
