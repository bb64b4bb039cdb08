"""Answers as `deep_ep.utils` for a caller written against DeepEP V1: the two event classes."""

from moe_ep.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
