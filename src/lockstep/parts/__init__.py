"""What joins a training without changing its result: the log's writers, figures on memory, speed and operations, epoch
lines, images, profiles. `checks/` looks for faults before and after the first steps."""
