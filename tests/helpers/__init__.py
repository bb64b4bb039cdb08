"""What several folders of tests share: ranks, routings and comparisons, oracles, and what stands in for hardware."""
