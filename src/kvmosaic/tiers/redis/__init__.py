"""Redis tier: entries as hashes of parts."""
