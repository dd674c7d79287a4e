"""Redis tier: entries in parts, with quotas kept by scripts."""
