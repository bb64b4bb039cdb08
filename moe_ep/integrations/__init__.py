"""Doors for frameworks that know this package under another name. Each is opened by a call, none by its import."""
