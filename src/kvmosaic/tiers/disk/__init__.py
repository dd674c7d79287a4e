"""Disk tier: entries as files of a folder, shared by processes of one machine."""
