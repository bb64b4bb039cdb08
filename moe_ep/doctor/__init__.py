"""What `moe-ep doctor` looks at: each check is a small function from a machine to findings.

`finding` is what a check says, `machine` what it may ask, `software`, `hardware`, `packages` and `environment` are the
checks, `report` runs them, decides about requirements and prints. Nothing here changes anything.
"""
