"""Evaluation of composed answers: tasks with exact answers, scores, tables, and the policy a model needs."""
