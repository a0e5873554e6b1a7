"""Models that are split over neighbouring ranks (`parallel.tensor`): the layout of ranks, the plans, and the strategy.
The core has only `World.data_rank` and `sum_once` for this."""
