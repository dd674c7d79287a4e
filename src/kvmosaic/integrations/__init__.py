"""Our planner and store inside other engines."""
