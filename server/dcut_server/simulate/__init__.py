"""What a policy would have done: the cost model of a machine against blocks drawn or recorded, without an engine."""
