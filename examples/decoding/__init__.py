"""Parts of examples/low_latency_decode.py."""
