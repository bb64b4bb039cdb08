"""A model of the rings through which expert rows come to a sum on sm_90 and later."""
