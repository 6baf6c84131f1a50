"""From a table to source that needs no tiledsched: a tree over sizes whose leaves are schedules, as a module or as a patch."""
