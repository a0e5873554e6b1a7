"""Pages for users of other libraries: their names and ours, and an example before and after."""
