"""The two exceptions that callers may want to catch by name."""


class ConfigError(ValueError):
    """A configuration that is unknown, of the wrong type, out of range, or different between ranks."""


class EPTimeoutError(RuntimeError):
    """A wait for a peer passed the limit `timeout_secs`, or the connection to a peer was lost.

    The message names the operation, the group and, where known, the ranks that did not come.
    The buffer stays unusable until every rank has called `Buffer.reset()`.
    """
