"""The command `kvmosaic warm`: computes a folder of documents into tiers."""
