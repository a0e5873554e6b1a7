"""What joins a training without changing its result: logs, pictures, measurements."""
