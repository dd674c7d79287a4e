"""The command `kvmosaic cache`: lists, verifies and cleans entries of tiers."""
