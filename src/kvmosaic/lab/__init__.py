"""The lab: measuring, tuning, training and planning. Nothing else of the package imports it."""
