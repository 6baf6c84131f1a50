"""How repeatable the selection is: the race beside other ways to choose, on the same programs, again and again."""
