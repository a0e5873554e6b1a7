"""Commands of `lockstep` that this package declares as entry points."""
