"""What is silently wrong in a data set: findings, the finders of a task, the lines of the log, and the page.

A task that can be looked at has two members:

- `finders`: a tuple of functions `find(data) -> Iterator[DataFinding]`, one for each fault. Each is a small function,
  next to others of its kind: `lockstep_recipes/tasks/vision/faults/`, `.../ct/faults/`, `.../text/faults/`.
- `data_to_look_at(extent) -> data`: what the finders get, with the paths, labels and texts that the task has read.
  `extent` limits how many samples of each split the data opens (`finding.Extent`). Facts that need an open file are
  computed once, and shared by the finders: see `lockstep_recipes.tasks.vision.faults.view`.

A finder yields a finding for each file that shows the fault; `look` counts and orders them. It reads no file that the
data does not offer, and raises nothing. An `error`: the training would be wrong, or end. A `warning`: a person should
look. A finder that warns about a clean data set is worse than none.
"""
