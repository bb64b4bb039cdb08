"""The two exceptions that callers may want to catch by name."""


class ConfigError(ValueError):
    """A configuration that is unknown, of the wrong type, out of range, or different between ranks.

    The message names the setting, what it is and what it may be, one line a setting; between ranks both values and
    whose they are. It is raised on every rank then, and the buffer stays usable.
    """


class EPTimeoutError(RuntimeError):
    """A wait for a peer passed the limit `timeout_secs`, or the connection to a peer was lost.

    The message names the operation, the group and, where known, the ranks that did not come.
    The buffer stays unusable until every rank has called `Buffer.reset()`.
    """
