"""A ShardingPlan as people read it."""
