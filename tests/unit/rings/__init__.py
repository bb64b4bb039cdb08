"""Models of the rings in shared memory through which the warps of a block hand rows on, on sm_90 and later."""
