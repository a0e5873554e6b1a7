"""Is a training right? Each promise as a check, on the user's own model and data."""
