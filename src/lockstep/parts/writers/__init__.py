"""The built-in writers. Each module holds a subclass of `Writer`, and `log.writers` names the module."""
