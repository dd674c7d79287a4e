"""The command `kvmosaic cache`: lists, explains, verifies, cleans and bundles entries of tiers."""
