"""Evaluation of composed answers against full attention: tasks, scores, tables, and tuning of the policy."""
