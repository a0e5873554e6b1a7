"""The writers that Lockstep brings along: each module holds one subclass of `Writer`, and `log.writers` names the module."""
