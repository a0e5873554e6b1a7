"""The built-in writers. Each module contains a subclass of `Writer`, and `log.writers` names the module."""
