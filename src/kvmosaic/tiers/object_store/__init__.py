"""Object store tier: entries as objects of a bucket (S3 and compatible stores)."""
