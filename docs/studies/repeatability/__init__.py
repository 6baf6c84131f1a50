"""How repeatable the selection is: the race and other ways to choose, on the same programs, again and again."""
